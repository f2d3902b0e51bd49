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


def top_p(scores: Array, p: float, *, strict: bool = False, most: int | None = None) -> Routing:
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
        probs.append(list(probabilities[ranked]))
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
