"""Union-of-Experts: what follows from its formula for special weights, sizes and neurons.

test_expert_layers.py compares it with a loop over tokens; the layouts of tests/model, with one
process.
"""

import numpy
import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.model.flops import ExpertLayerFlops, expert_layer_flops
from moe_parallel.selection.tokens import Tokens
from tests.layers.cases import direction, uoe
from tests.layers.single import EXPERTS, Case, build, run, values

GATE_UP, OUT = "w_gate_up_ED2R", "w_out_ERD"
REST_GATE_UP, REST_OUT = "experts.w_gate_up_LD2F", "experts.w_out_LFD"


def output(case, given):
    return run(build(case, given, torch.float64, "reference"), given, direction(case))


def test_by_hand():
    """Of x only the first number is not 0; it is 1. Each expert has one routing neuron, with
    u = SiLU(1) (2, 1, 0, 0), so the first expert is chosen with the probability 1."""
    case = Case(uoe(k=1, aux=0.0), tokens=1)
    given = {name: numpy.zeros_like(array) for name, array in values(case).items()}
    given["x"][..., 0] = 1
    given[GATE_UP][:, 0, 0, 0], given[GATE_UP][:, 0, 1, 0] = 1, (2, 1, 0, 0)
    given[OUT][:, 0, 0] = (1, 10, 100, 100)
    given[REST_GATE_UP][0, 0, :, 0], given[REST_OUT][0, 0, 0] = 1, 3
    y, _ = output(case, given)
    silu = 0.731059
    assert y[0, 0].tolist() == pytest.approx([silu * (2 * 1 + 1 * 10 + 3), 0, 0, 0, 0], rel=1e-5)


def test_norms_and_loads_of_a_bf16_layer_are_fp32():
    """In bf16, 256 and 1 are 256, and close norms would tie."""
    case = Case(uoe(k=EXPERTS), tokens=300)
    given = values(case)
    layer = build(case, given, torch.bfloat16, "reference")
    x_TD = torch.from_numpy(given["x"]).flatten(0, 1).bfloat16()
    choices = layer.choose(x_TD, Tokens(1))
    assert choices.scores_TE.dtype == choices.probs_TK.dtype == torch.float32
    assert choices.tokens_per_expert().tolist() == [300] * EXPERTS


@pytest.mark.parametrize(
    ("options", "neurons"),
    [({}, 12), ({"moe_ffn_hidden_size": 50}, 12), ({"uoe_routing_neurons": 5}, 5)],
)
def test_routing_neurons_of_all_experts_are_as_wide_as_one_expert(options, neurons):
    sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 4}
    config = make_config(sizes | {"expert_selection": "uoe"} | options)
    width = config.expert_width
    assert config.selection.routing_neurons(width, 4) == neurons
    flops = expert_layer_flops(config)
    expected = ExpertLayerFlops(2 * 4 * 3 * 32 * neurons, 2 * 3 * 32 * (width - neurons))
    assert flops == expected
