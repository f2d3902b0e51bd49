"""The rules beside plain top-K, token by token or expert by expert, in numpy fp64, by search.

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
    """The k experts of greatest rank.

    Args:
        gate: selected (probabilities divided by their sum over the chosen), all (as they are) or
            scores (the scores as they are).
        score_function: softmax, or sigmoid, which is divided by its sum over all where a
            probability is needed.
        rank_by: what is ranked, plus the bias: scores, or probabilities (sigmoids as they are).
        bias: of each expert; it never weighs.
        groups: (number of groups, groups that a token may choose from). A group is as good as the
            sum of its best k / groups experts.
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
    """The experts of the `allowed` best groups, found by trying every set of groups."""
    groups = [list(group) for group in numpy.arange(len(rank)).reshape(num_groups, -1)]
    best_of_each = max(1, k // allowed)

    def value(chosen: tuple[list[int], ...]) -> float:
        return sum(sum(sorted(rank[group])[-best_of_each:]) for group in chosen)

    return [e for group in max(itertools.combinations(groups, allowed), key=value) for e in group]


def top_p(scores: Array, p: float, *, strict: bool = False, most: int | None = None) -> Routing:
    """The smallest set of experts whose probabilities sum to p, found by trying every set.

    Reached is p at `>= p`, or at `> p` where strict; sums within 1e-9 of p are equal to it.
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
    """Each expert takes its best round(factor T / E) tokens, the earlier ones among equals."""
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


def in_turn(scores: Array, k: int, *, raw_probability: bool = False) -> Routing:
    """Token 0 goes to experts 0 .. k-1, token 1 to the next k, and so on, round and round."""
    experts, probs, turn = [], [], itertools.count()
    for row in scores:
        chosen = [next(turn) % len(row) for _ in range(k)]
        experts.append(chosen)
        probs.append(list(softmax(row)[chosen] if raw_probability else softmax(row[chosen])))
    return Routing(numpy.array(scores), experts, probs)
