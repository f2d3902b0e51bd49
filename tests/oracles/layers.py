"""The layers as loops over tokens, in numpy fp64, written from the papers.

Shape suffixes as in the package: T tokens, D model width, E experts, K choices, F expert width,
R low-rank size, W wide size.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy

Array = Any  # numpy arrays of any shape


@dataclass
class Routing:
    """The experts of each token by decreasing score, None if dropped, and their probs.

    Tokens may have different numbers of experts, including none.
    """

    scores: Array  # [T, E]
    experts: list[list[int | None]]
    probs: list[list[float]]
    probabilities: Array = None  # [T, E]; None: the softmax of the scores

    def __post_init__(self) -> None:
        if self.probabilities is None:
            self.probabilities = numpy.array([softmax(row) for row in self.scores])


def silu(x: Array) -> Array:
    return x / (1 + numpy.exp(-x))


def softmax(x: Array) -> Array:
    powers = numpy.exp(x - numpy.max(x))
    return powers / powers.sum()


def route(scores: Array, k: int) -> Routing:
    """The k largest scores of each token (ties: the lower index), and their softmax."""
    experts: list[list[int | None]] = []
    probs = []
    for row in scores:
        ranked = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:k]
        experts.append(list(ranked))
        probs.append(list(softmax(row[ranked])))
    return Routing(numpy.array(scores), experts, probs)


def router_scores(x_TD: Array, w_ED: Array) -> Array:
    return numpy.array([[numpy.dot(w, x) for w in w_ED] for x in x_TD])


def norm_scores(x_TD: Array, w_down_EDR: Array) -> Array:
    """p_i = ||x W_down^i||_2 of every expert (AoE, Algorithm 2, lines 3 to 6)."""
    return numpy.array(
        [[math.sqrt(sum(c * c for c in x @ w_DR)) for w_DR in w_down_EDR] for x in x_TD]
    )


def contrastive_scores(
    x_TD: Array, w_key_RD: Array, w_query_ERD: Array, reference_D: Array
) -> Array:
    """(cos of expert e's query at x and the key of x, less that of its query at the reference and
    the same key) / sqrt(d_2) (CoRM, Eq. 1 to 6). A query at a reference of 0 adds nothing."""

    def cosine(a: Array, b: Array) -> float:
        lengths = math.sqrt(sum(n * n for n in a)) * math.sqrt(sum(n * n for n in b))
        return sum(m * n for m, n in zip(a, b, strict=True)) / lengths if lengths else 0.0

    root = math.sqrt(len(w_key_RD))
    return numpy.array(
        [
            [
                (cosine(w @ x, w_key_RD @ x) - cosine(w @ reference_D, w_key_RD @ x)) / root
                for w in w_query_ERD
            ]
            for x in x_TD
        ]
    )


def capacity(tokens: int, k: int, num_experts: int, factor: float) -> int:
    return math.ceil(tokens * k / num_experts * factor)


def drop(routing: Routing, limit: int | list[int], policy: str) -> Routing:
    """Experts accept choices one by one until they have `limit`; the other choices become None.

    A list has a limit for each expert.

    probs: in the order of decreasing probs; position: all first choices, then all second choices.
    Ties are resolved in the order of tokens, then of choices.
    """
    slots = [(t, j) for t, row in enumerate(routing.experts) for j in range(len(row))]
    if policy == "probs":
        slots.sort(key=lambda slot: -routing.probs[slot[0]][slot[1]])
    else:
        slots.sort(key=lambda slot: slot[1])
    taken = [0] * routing.scores.shape[1]
    limits = limit if isinstance(limit, list) else [limit] * len(taken)
    kept: list[list[int | None]] = [list(row) for row in routing.experts]
    for token, choice in slots:
        expert = kept[token][choice]
        if expert is None:
            continue
        if taken[expert] == limits[expert]:
            kept[token][choice] = None
        else:
            taken[expert] += 1
    return Routing(routing.scores, kept, routing.probs, routing.probabilities)


def swiglu_expert(x_D: Array, w_g_DF: Array, w_p_DF: Array, w_o_FD: Array) -> Array:
    """(SiLU(x W_g) * (x W_p)) W_o."""
    return (silu(x_D @ w_g_DF) * (x_D @ w_p_DF)) @ w_o_FD


def autonomous_expert(
    x_D: Array, w_down_DR: Array, w_up_RW: Array, w_p_DW: Array, w_o_WD: Array
) -> Array:
    """(SiLU(C W_up) * (x W_p)) W_o with C = x W_down (AoE, Algorithm 2, line 11)."""
    return (silu((x_D @ w_down_DR) @ w_up_RW) * (x_D @ w_p_DW)) @ w_o_WD


def routing_neurons(x_D: Array, w_gate_up_D2R: Array) -> Array:
    """u = SiLU(x W_g) * (x W_p) of the neurons by which UoE ranks an expert."""
    return silu(x_D @ w_gate_up_D2R[:, 0]) * (x_D @ w_gate_up_D2R[:, 1])


def union_scores(x_TD: Array, w_gate_up_ED2R: Array, norm_of: str) -> Array:
    """The norm of each expert's routing neurons: of u, of SiLU(x W_g), or of x W_g."""

    def score(x_D: Array, w_D2R: Array) -> float:
        gate = x_D @ w_D2R[:, 0]
        of = {"activation": routing_neurons(x_D, w_D2R), "silu": silu(gate), "gate": gate}
        return math.sqrt(sum(value * value for value in of[norm_of]))

    return numpy.array([[score(x_D, w_D2R) for w_D2R in w_gate_up_ED2R] for x_D in x_TD])


def union_output(
    x_TD: Array, w_gate_up_ED2R: Array, w_out_ERD: Array, choices: Routing, gated: bool
) -> Array:
    """sum_i u_i W_o^i over all experts. If `gated`, those that are chosen count with their prob."""
    y_TD = numpy.zeros_like(x_TD)
    for t, x_D in enumerate(x_TD):
        probs = dict(zip(choices.experts[t], choices.probs[t], strict=True)) if gated else {}
        for expert, (w_D2R, w_RD) in enumerate(zip(w_gate_up_ED2R, w_out_ERD, strict=True)):
            y_TD[t] += probs.get(expert, 1.0) * (routing_neurons(x_D, w_D2R) @ w_RD)
    return y_TD


def combine(x_TD: Array, routing: Routing, experts: list[Any]) -> Array:
    """sum_i probs_i E_i(x) over the experts that kept the token; `experts`: functions of x_D."""
    y_TD = numpy.zeros_like(x_TD)
    for t, x_D in enumerate(x_TD):
        for expert, gate in zip(routing.experts[t], routing.probs[t], strict=True):
            if expert is not None:
                y_TD[t] += gate * experts[expert](x_D)
    return y_TD


def constant_expert(x_D: Array, w_AD: Array, v_D: Array) -> Array:
    """a_1 x + a_2 v with (a_1, a_2) = softmax(W_c x) (MoE++)."""
    a = softmax(w_AD @ x_D)
    return a[0] * x_D + a[1] * v_D


DIRECTIONS = 4


def directions(shape: tuple[int, ...]) -> Array:
    """Random directions in which an array of this shape is moved: [DIRECTIONS, *shape]."""
    return numpy.random.default_rng(2).normal(size=(DIRECTIONS, *shape))


def slopes(gradient: Array) -> Array:
    """The derivatives along `directions`, from a gradient: [DIRECTIONS]."""
    return numpy.tensordot(directions(gradient.shape), gradient, gradient.ndim)


def numeric_slopes(function: Any, values: dict[str, Array], step: float = 1e-6) -> dict[str, Array]:
    """The derivatives of function(values) along `directions` of each array, by differences.

    Every wrong entry of a gradient changes every slope. A gradient by differences would take two
    calls for each entry.
    """

    def slope(name: str, way: Array) -> float:
        sides = [function({**values, name: values[name] + size * way}) for size in (step, -step)]
        return (sides[0] - sides[1]) / (2 * step)

    return {
        name: numpy.array([slope(name, way) for way in directions(array.shape)])
        for name, array in values.items()
    }
