"""The probe without routers: each selection equals numpy loops, and the model stays unchanged."""

from typing import Any

import numpy
import pytest
import torch
from torch import nn

from moe_parallel.errors import InputError
from moe_parallel.evaluation.routerless_probe import (
    PROBE_GATES,
    PROBE_NODES,
    PROBE_NORMS,
    Probe,
    ProbedLayer,
    probes,
    probing,
)
from moe_parallel.selection.tokens import Tokens
from moe_parallel.systems import AoESelection, TopKSelection
from tests.layers.single import EXPERT_WIDTH, EXPERTS, WIDTH, Case, build, values
from tests.oracles.layers import Array, silu, softmax, swiglu_expert

K = 2
ROUTED = Case(TopKSelection(moe_router_topk=K), sequences=2, tokens=8)
FACTORIZED = Case(TopKSelection(moe_router_topk=K, moe_gate_low_rank_size=2), sequences=2, tokens=8)


def probe_named(node: str, norm: str = "", gate: str = "uniform") -> Probe:
    (found,) = [
        each for each in probes(K) if (each.selected_by, each.norm, each.gate) == (node, norm, gate)
    ]
    return found


def layer_of(case: Case, given: dict[str, Array]) -> Any:
    return build(case, given, torch.float64, "reference").eval()


def output(layer: Any, x_SBD: Array) -> Array:
    with torch.no_grad():
        return layer(torch.from_numpy(x_SBD))[0].numpy()


# The oracle.


def activation(node: str, x_D: Array, w_g: Array, w_p: Array, w_o: Array) -> Array:
    return {
        "x W_g": x_D @ w_g,
        "x W_p": x_D @ w_p,
        "SiLU(x W_g)": silu(x_D @ w_g),
        "SiLU(x W_g) * x W_p": silu(x_D @ w_g) * (x_D @ w_p),
        "output": swiglu_expert(x_D, w_g, w_p, w_o),
    }[node]


def norm_of(name: str, values_X: Array) -> float:
    sizes = [abs(float(value)) for value in values_X]
    return {"L1": sum(sizes), "L2": sum(size**2 for size in sizes) ** 0.5, "Linf": max(sizes)}[name]


def expected(
    matrices: list[tuple[Array, Array, Array]],
    x_SBD: Array,
    node: str,
    norm: str,
    gate: str,
    k: int,
) -> Array:
    y_SBD = numpy.zeros_like(x_SBD)
    for place in numpy.ndindex(x_SBD.shape[:2]):
        x_D = x_SBD[place]
        norms = [norm_of(norm, activation(node, x_D, *each)) for each in matrices]
        ranked = sorted(range(EXPERTS), key=lambda e: -norms[e])[:k]
        weights = {
            "softmax": softmax(numpy.array([norms[e] for e in ranked])),
            "uniform": [1 / k] * k,
        }[gate]
        for e, weight in zip(ranked, weights, strict=True):
            y_SBD[place] += weight * swiglu_expert(x_D, *matrices[e])
    return y_SBD


def swiglu_matrices(given: dict[str, Array]) -> list[tuple[Array, Array, Array]]:
    gate_up, out = given["experts.w_gate_up_LD2F"], given["experts.w_out_LFD"]
    return [(gate_up[e, :, 0], gate_up[e, :, 1], out[e]) for e in range(EXPERTS)]


@pytest.mark.parametrize("gate", PROBE_GATES)
@pytest.mark.parametrize("norm", PROBE_NORMS)
@pytest.mark.parametrize("node", PROBE_NODES)
def test_the_greatest_activations_compute(node: str, norm: str, gate: str) -> None:
    given = values(ROUTED)
    model = nn.Sequential(layer_of(ROUTED, given))
    with probing(model, probe_named(node, norm, gate)):
        found = output(model[0], given["x"])
    oracle = expected(swiglu_matrices(given), given["x"], node, norm, gate, K)
    assert found == pytest.approx(oracle, rel=1e-5, abs=1e-6)  # norms and probs are fp32


def test_a_factorized_gate_is_multiplied_out() -> None:
    shapes = {
        "x": (4, 2, WIDTH),
        "w_router_ED": (EXPERTS, WIDTH),
        "w_down_EDR": (EXPERTS, WIDTH, 2),
        "experts.w_up_LRW": (EXPERTS, 2, EXPERT_WIDTH),
        "experts.w_p_LDW": (EXPERTS, WIDTH, EXPERT_WIDTH),
        "experts.w_out_LWD": (EXPERTS, EXPERT_WIDTH, WIDTH),
    }
    rng = numpy.random.default_rng(3)
    given = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x, _, w_down, w_up, w_p, w_out = given.values()
    model = nn.Sequential(layer_of(FACTORIZED, given))
    with probing(model, probe_named("x W_g", "L2", "softmax")):
        found = output(model[0], x)
    matrices = list(zip(w_down @ w_up, w_p, w_out, strict=True))
    oracle = expected(matrices, x, "x W_g", "L2", "softmax", K)
    assert found == pytest.approx(oracle, rel=1e-5, abs=1e-6)


def test_chance_takes_k_experts_with_equal_probs_anew_for_each_token() -> None:
    case = Case(ROUTED.selection, tokens=400)
    routed = layer_of(case, values(case))
    x_TD = torch.zeros(400, WIDTH, dtype=torch.float64)
    tokens = Tokens(1)
    choices = probe_named("random").replacement(routed).choose(x_TD, tokens)
    assert (choices.probs_TK == 1 / K).all()
    assert (choices.experts_TK[:, 0] != choices.experts_TK[:, 1]).all()
    # Binomial, mean 200 and standard deviation 10.
    assert choices.tokens_per_expert().tolist() == pytest.approx([200] * EXPERTS, abs=50)
    again = probe_named("random").replacement(routed).choose(x_TD, tokens)
    assert torch.equal(again.experts_TK, choices.experts_TK)
    routed.set_layer_number(2)
    elsewhere = probe_named("random").replacement(routed).choose(x_TD, tokens)
    assert not torch.equal(elsewhere.experts_TK, choices.experts_TK)


def test_afterward_the_model_is_as_it_was() -> None:
    given = values(ROUTED)
    model = nn.Sequential(layer_of(ROUTED, given), layer_of(ROUTED, values(ROUTED, seed=1)))
    layers, state = list(model), {name: w.clone() for name, w in model.state_dict().items()}
    before = output(model[0], given["x"])
    with pytest.raises(RuntimeError, match="stop"), probing(model, probe_named("output", "L2")):
        assert all(isinstance(layer, ProbedLayer) for layer in model)
        assert model.state_dict().keys() == state.keys()
        model.eval()
        output(model[0], given["x"])
        raise RuntimeError("stop")
    assert all(a is b for a, b in zip(layers, model, strict=True))
    assert all(torch.equal(w, state[name]) for name, w in model.state_dict().items())
    assert numpy.array_equal(output(model[0], given["x"]), before)


def test_experts_without_a_router_are_refused() -> None:
    case = Case(AoESelection(aoe_low_rank_size=2))
    model = nn.Sequential(layer_of(case, values(case)), nn.Linear(2, 2))
    with pytest.raises(InputError, match="no routers"), probing(model, probe_named("random")):
        pass
