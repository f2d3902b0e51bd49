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


def route(scores: Array, k: int, *, raw_probability: bool = False) -> Routing:
    """The k largest scores of each token (ties: the lower index), and their softmax.

    raw_probability: the probs are the softmax over all experts (Top-1 routing).
    """
    experts: list[list[int | None]] = []
    probs = []
    for row in scores:
        ranked = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:k]
        experts.append(list(ranked))
        probs.append(list(softmax(row)[ranked] if raw_probability else softmax(row[ranked])))
    return Routing(numpy.array(scores), experts, probs)


def router_scores(x_TD: Array, w_ED: Array) -> Array:
    return numpy.array([[numpy.dot(w, x) for w in w_ED] for x in x_TD])


def norm_scores(x_TD: Array, w_down_EDR: Array) -> Array:
    """p_i = ||x W_down^i||_2 of every expert (AoE, Algorithm 2, lines 3 to 6)."""
    return numpy.array(
        [[math.sqrt(sum(c * c for c in x @ w_DR)) for w_DR in w_down_EDR] for x in x_TD]
    )


def capacity(tokens: int, k: int, num_experts: int, factor: float) -> int:
    return math.ceil(tokens * k / num_experts * factor)


def drop(routing: Routing, limit: int, policy: str) -> Routing:
    """Experts accept choices one by one until they have `limit`; the other choices become None.

    probs: in the order of decreasing probs; position: all first choices, then all second choices.
    Ties are resolved in the order of tokens, then of choices.
    """
    slots = [(t, j) for t, row in enumerate(routing.experts) for j in range(len(row))]
    if policy == "probs":
        slots.sort(key=lambda slot: -routing.probs[slot[0]][slot[1]])
    else:
        slots.sort(key=lambda slot: slot[1])
    taken = [0] * routing.scores.shape[1]
    kept: list[list[int | None]] = [list(row) for row in routing.experts]
    for token, choice in slots:
        expert = kept[token][choice]
        if expert is None:
            continue
        if taken[expert] == limit:
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


def combine(x_TD: Array, routing: Routing, experts: list[Any]) -> Array:
    """sum_i probs_i E_i(x) over the experts that kept the token; `experts`: functions of x_D."""
    y_TD = numpy.zeros_like(x_TD)
    for t, x_D in enumerate(x_TD):
        for expert, gate in zip(routing.experts[t], routing.probs[t], strict=True):
            if expert is not None:
                y_TD[t] += gate * experts[expert](x_D)
    return y_TD


def numeric_gradient(function: Any, values: dict[str, Array], step: float = 1e-6) -> Any:
    """The derivative of function(values) by each entry of each array, by central differences."""
    gradients = {}
    for name, array in values.items():
        gradient = numpy.zeros_like(array)
        for index in numpy.ndindex(array.shape):
            sides = []
            for sign in (1, -1):
                moved = array.copy()
                moved[index] += sign * step
                sides.append(function({**values, name: moved}))
            gradient[index] = (sides[0] - sides[1]) / (2 * step)
        gradients[name] = gradient
    return gradients
