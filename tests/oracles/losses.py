"""The auxiliary losses as loops over tokens or experts, in numpy fp64, from their formulas.

Tokens are in Megatron's order [S, B]: token t belongs to sequence t % B.
"""

import math

import numpy

from tests.oracles.layers import Array, Routing


def load(routing: Routing) -> list[float]:
    """f_i: the fraction of the tokens that chose expert i."""
    tokens, num_experts = routing.scores.shape
    return [sum(row.count(e) for row in routing.experts) / tokens for e in range(num_experts)]


def load_balancing(
    routing: Routing, load_elsewhere: list[float] | None = None, weights: list[float] | None = None
) -> float:
    """n sum_i w_i f_i P_i; P_i: the mean probability of i. f may come from other tokens."""
    tokens, num_experts = routing.scores.shape
    total = 0.0
    for expert, share in enumerate(load(routing) if load_elsewhere is None else load_elsewhere):
        weight = 1.0 if weights is None else weights[expert]
        total += weight * share * sum(row[expert] for row in routing.probabilities) / tokens
    return num_experts * total


def sequence_load_balancing(
    routing: Routing, sequences: int, weights: list[float] | None = None
) -> float:
    """The mean of `load_balancing` over the sequences, each computed separately."""
    total = 0.0
    for number in range(sequences):
        own = range(number, len(routing.scores), sequences)
        part = Routing(
            routing.scores[own], [routing.experts[t] for t in own], [], routing.probabilities[own]
        )
        total += load_balancing(part, weights=weights)
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


def routing_free(routing: Routing, expert_share: float) -> float:
    """mu L_EB + (1 - mu) L_TB, with G = the score of each chosen expert, less its bias."""
    tokens, num_experts = routing.scores.shape
    f, g = numpy.zeros((tokens, num_experts)), numpy.zeros((tokens, num_experts))
    for t, row in enumerate(routing.experts):
        for expert in row:
            f[t, expert] = 1
            g[t, expert] = routing.scores[t, expert]
    of_experts = sum(f[:, e].mean() * g[:, e].mean() for e in range(num_experts)) / num_experts
    of_tokens = sum(f[t].mean() * g[t].mean() for t in range(tokens)) / tokens
    return float(expert_share * of_experts + (1 - expert_share) * of_tokens)


def z(logits_TE: Array) -> float:
    """mean_t logsumexp(logits_t)^2."""
    return sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits_TE) / len(logits_TE)


def l1(routing: Routing, target: float) -> float:
    """The mean over tokens of sum_i f_i g_i; f_i: n / target times the load of expert i."""
    tokens, num_experts = routing.scores.shape
    loads = load(routing)
    total = 0.0
    for experts, probs in zip(routing.experts, routing.probs, strict=True):
        for expert, gate in zip(experts, probs, strict=True):
            total += num_experts / target * loads[expert] * gate
    return total / tokens


def entropy(routing: Routing) -> float:
    """The mean over tokens of -sum_i P_i ln P_i."""
    total = 0.0
    for row in routing.probabilities:
        total -= sum(p * numpy.log(p) for p in row if p > 0)
    return total / len(routing.probabilities)


def noise_bound(rows: Array) -> list[float]:
    """e_i = min_(j != i) |R_i - R_j| / (2 |R_i|); 0 for a row of zeros."""
    bounds = []
    for i, row in enumerate(rows):
        length = math.dist(row, [0.0] * len(row))
        nearest = min(math.dist(row, other) for j, other in enumerate(rows) if j != i)
        bounds.append(nearest / (2 * length) if length else 0.0)
    return bounds


def coupling_norms(rows: Array, w_g: Array) -> Array:
    """M_ij = |R_i W_g^j|."""
    norms = [[math.sqrt(sum(h * h for h in row @ w_j)) for w_j in w_g] for row in rows]
    return numpy.array(norms)


def coupling(norms: Array, alpha: float) -> float:
    """1/n^2 sum_i sum_(j != i) [max(M_ij - alpha M_ii, 0) + max(M_ji - alpha M_ii, 0)]."""
    n, total = len(norms), 0.0
    for i in range(n):
        for j in range(n):
            if j != i:
                total += max(norms[i][j] - alpha * norms[i][i], 0.0)
                total += max(norms[j][i] - alpha * norms[i][i], 0.0)
    return total / n**2
