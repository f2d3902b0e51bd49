"""The rules other than plain top-K, per token or per expert, in numpy fp64, by search.

Shape suffixes: T tokens, E experts, K choices of a token.
"""

import itertools
import math

import numpy

from tests.oracles.layers import Array, Routing, softmax


def sigmoid(x: Array) -> Array:
    return 1 / (1 + numpy.exp(-x))


def top_k(
    scores: Array,
    k: int,
    *,
    gate: str = "selected",
    score_function: str = "softmax",
    rank_by: str = "scores",
    bias: Array | None = None,
    groups: tuple[int, int] | None = None,
) -> Routing:
    """The k experts with the largest rank value.

    Args:
        gate: the probs: selected (probabilities divided by their sum over the chosen experts),
            all (probabilities unchanged) or scores (scores unchanged).
        score_function: softmax, or sigmoid; a sigmoid is divided by its sum over all experts if a
            probability is needed.
        rank_by: the value to which the bias is added to rank: scores, or probabilities (sigmoids
            unchanged).
        bias: one value per expert; it never changes the probs.
        groups: (number of groups, groups that a token may choose from). The value of a group is
            the sum of its best k / groups experts.
    """
    tokens, num_experts = scores.shape
    experts, probs, probabilities = [], [], []
    for row in scores:
        affinity = sigmoid(row) if score_function == "sigmoid" else softmax(row)
        rank = (row if rank_by == "scores" else affinity) + (0 if bias is None else bias)
        allowed = range(num_experts) if groups is None else _of_best_groups(rank, k, *groups)
        chosen = sorted(allowed, key=lambda expert: (-rank[expert], expert))[:k]
        weights = {
            "selected": affinity[chosen] / sum(affinity[chosen]),
            "all": affinity[chosen],
            "scores": row[chosen],
        }
        experts.append(chosen)
        probs.append(list(weights[gate]))
        probabilities.append(affinity / sum(affinity))
    return Routing(numpy.array(scores), experts, probs, numpy.array(probabilities))


def _of_best_groups(rank: Array, k: int, num_groups: int, allowed: int) -> list[int]:
    """The experts of the `allowed` best groups, found by a search of all sets of groups."""
    groups = [list(group) for group in numpy.arange(len(rank)).reshape(num_groups, -1)]
    best_of_each = max(1, k // allowed)

    def value(chosen: tuple[list[int], ...]) -> float:
        return sum(sum(sorted(rank[group])[-best_of_each:]) for group in chosen)

    return [e for group in max(itertools.combinations(groups, allowed), key=value) for e in group]


def top_p(
    scores: Array,
    p: float,
    *,
    strict: bool = False,
    most: int | None = None,
    renormalizes: bool = False,
) -> Routing:
    """The smallest set of experts whose probabilities sum to p, found by a search of all sets.

    The sum reaches p at `>= p`, or at `> p` if `strict`; sums within 1e-9 of p count as equal to p.
    """
    experts, probs = [], []
    for row in scores:
        probabilities = softmax(row)
        for size in range(1, len(row) + 1):
            sets = itertools.combinations(range(len(row)), size)
            best = max(sets, key=lambda chosen: math.fsum(probabilities[list(chosen)]))
            total = math.fsum(probabilities[list(best)])
            if total > p + 1e-9 or (not strict and total >= p - 1e-9):
                break
        ranked = sorted(best, key=lambda expert: (-probabilities[expert], expert))[:most]
        experts.append(ranked)
        total = math.fsum(probabilities[ranked]) if renormalizes else 1.0
        probs.append(list(probabilities[ranked] / total))
    return Routing(numpy.array(scores), experts, probs)


def relu(scores: Array) -> Routing:
    """Every expert with a positive score; that score is its prob."""
    experts = [sorted((e for e in range(len(row)) if row[e] > 0), key=lambda e: (-row[e], e))
               for row in scores]  # fmt: skip
    probs = [list(row[chosen]) for row, chosen in zip(scores, experts, strict=True)]
    return Routing(numpy.array(scores), experts, probs)


def expert_choice(scores: Array, factor: float, *, by_softmax: bool = False) -> Routing:
    """Each expert takes its best round(factor T / E) tokens; ties go to the earlier token."""
    tokens, num_experts = scores.shape
    weights = numpy.array([softmax(row) if by_softmax else row for row in scores])
    taken = int(factor * tokens / num_experts + 0.5)
    takers: list[list[int]] = [[] for _ in range(tokens)]
    for expert in range(num_experts):
        best = sorted(range(tokens), key=lambda t: (-weights[t, expert], t))
        for token in best[:taken]:
            takers[token].append(expert)
    experts = [
        sorted(row, key=lambda e: (-weights[token, e], e)) for token, row in enumerate(takers)
    ]
    probs = [list(weights[token, row]) for token, row in enumerate(experts)]
    return Routing(numpy.array(scores), experts, probs)


def threshold(scores: Array, cutoffs: Array, gate: str) -> Routing:
    """Each expert takes the tokens whose score is above its cutoff.

    gate: the probs: softmax or sigmoid of the scores, or the sigmoid of what is above the cutoff
        (margin).
    """
    experts, probs = [], []
    for row in scores:
        values = {
            "softmax": softmax(row),
            "sigmoid": sigmoid(row),
            "margin": sigmoid(row - cutoffs),
        }
        above = [expert for expert, score in enumerate(row) if score > cutoffs[expert]]
        experts.append(sorted(above, key=lambda expert: (-values[gate][expert], expert)))
        probs.append([values[gate][expert] for expert in experts[-1]])
    return Routing(numpy.array(scores), experts, probs)


def routing_free(values: Array, theta: float, gate: str) -> Routing:
    """Every expert whose value, the norm less the bias, is above theta.

    gate: the probs: the values (norm), or their softmax over the chosen experts (softmax).
    """
    experts, probs = [], []
    for row in values:
        chosen = sorted((e for e, value in enumerate(row) if value > theta), key=lambda e: -row[e])
        experts.append(chosen)
        probs.append(list(softmax(row[chosen]) if gate == "softmax" and chosen else row[chosen]))
    return Routing(numpy.array(values), experts, probs)


def one_expert(scores: Array) -> Routing:
    """Every token goes to expert 0, with its probability among all experts."""
    probs = [[softmax(row)[0]] for row in scores]
    return Routing(numpy.array(scores), [[0] for _ in scores], probs)


def in_turn(scores: Array, k: int, *, raw_probability: bool = False) -> Routing:
    """Token 0 goes to experts 0 .. k-1, token 1 to the next k, and so on, cyclically."""
    experts, probs, turn = [], [], itertools.count()
    for row in scores:
        chosen = [next(turn) % len(row) for _ in range(k)]
        experts.append(chosen)
        probs.append(list(softmax(row)[chosen] if raw_probability else softmax(row[chosen])))
    return Routing(numpy.array(scores), experts, probs)


def without_zero_experts(routing: Routing, zeros: range) -> Routing:
    """The probs divided by their sum over the choices that are not `zeros`; for `zeros` 0."""
    probs = []
    for experts, row in zip(routing.experts, routing.probs, strict=True):
        left = [0.0 if e in zeros else prob for e, prob in zip(experts, row, strict=True)]
        probs.append([prob / sum(left) if prob else 0.0 for prob in left])
    return Routing(routing.scores, routing.experts, probs, routing.probabilities)


def fill_table(counts: list[int], num_experts: int, k: int) -> list[list[int]]:
    """The experts of each token id: the k least loaded so far, for the most frequent id first.

    An id loads its experts with its count and 1. Ties go to the lower id and the lower expert.
    """
    table: list[list[int]] = [[] for _ in counts]
    load = [0] * num_experts
    left = list(range(len(counts)))
    while left:
        item = max(left, key=lambda each: (counts[each], -each))
        left.remove(item)
        for _ in range(k):
            others = [e for e in range(num_experts) if e not in table[item]]
            table[item].append(min(others, key=lambda e: (load[e], e)))
        for expert in table[item]:
            load[expert] += counts[item] + 1
    return table


def by_table(scores: Array, rows: list[list[int]], *, raw_probability: bool = False) -> Routing:
    """The experts in the row of each token, by decreasing score, with their softmax."""
    experts: list[list[int | None]] = []
    probs = []
    for row, chosen in zip(scores, rows, strict=True):
        ranked = sorted(chosen, key=lambda expert: -row[expert])
        experts.append(list(ranked))
        probs.append(list(softmax(row)[ranked] if raw_probability else softmax(row[ranked])))
    return Routing(numpy.array(scores), experts, probs)
