"""The auxiliary losses as loops over tokens, in numpy fp64, from their formulas.

Tokens are in Megatron's order [S, B]: token t belongs to sequence t % B.
"""

import math

import numpy

from tests.oracles.layers import Array, Routing


def load(routing: Routing) -> list[float]:
    """f_i: the fraction of the tokens that chose expert i."""
    tokens, num_experts = routing.scores.shape
    return [sum(row.count(e) for row in routing.experts) / tokens for e in range(num_experts)]


def load_balancing(routing: Routing, load_elsewhere: list[float] | None = None) -> float:
    """n sum_i f_i P_i; P_i: the mean probability of i. f may come from other tokens."""
    tokens, num_experts = routing.scores.shape
    total = 0.0
    for expert, share in enumerate(load(routing) if load_elsewhere is None else load_elsewhere):
        total += share * sum(row[expert] for row in routing.probabilities) / tokens
    return num_experts * total


def sequence_load_balancing(routing: Routing, sequences: int) -> float:
    """The mean of `load_balancing` over the sequences, each computed separately."""
    total = 0.0
    for number in range(sequences):
        own = range(number, len(routing.scores), sequences)
        part = Routing(
            routing.scores[own],
            [routing.experts[t] for t in own],
            [],
            routing.probabilities[own],
        )
        total += load_balancing(part)
    return total / sequences


def importance(routing: Routing) -> float:
    """(std / mean)^2 of the sums of probs over the experts; population variance."""
    sums = [0.0] * routing.scores.shape[1]
    for experts, probs in zip(routing.experts, routing.probs, strict=True):
        for expert, gate in zip(experts, probs, strict=True):
            if expert is not None:
                sums[expert] += gate
    mean = sum(sums) / len(sums)
    variance = sum((value - mean) ** 2 for value in sums) / len(sums)
    return variance / (mean**2 + 1e-10)


def z(logits_TE: Array) -> float:
    """mean_t logsumexp(logits_t)^2."""
    return sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits_TE) / len(logits_TE)


def entropy(routing: Routing) -> float:
    """The mean over tokens of -sum_i P_i ln P_i."""
    total = 0.0
    for row in routing.probabilities:
        total -= sum(p * numpy.log(p) for p in row if p > 0)
    return total / len(routing.probabilities)
