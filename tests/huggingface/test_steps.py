"""The tensors of our own architecture: the folded product by hand, and each tensor once."""

import dataclasses
import math

import pytest
import torch

from moe_parallel.config import parse_command_line
from moe_parallel.huggingface.own_model import own_config_json, own_steps
from moe_parallel.huggingface.tensors import ExpertNames, _fold, folded_width, plain_steps, routed
from tests.program import SMALL, flags
from tests.systems import options


def test_a_folded_expert_by_hand() -> None:
    """One expert with d = 2, d_low = 1, d_wide = 3, stored with a width of 4."""
    w_down = torch.tensor([[[2.0], [3.0]]])
    w_up = torch.tensor([[[1.0, 10.0, 100.0]]])
    w_p = torch.tensor([[[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]])
    (gate_up,) = _fold(4, w_down, w_up, w_p)
    assert gate_up.tolist() == [
        [[2, 3], [20, 30], [200, 300], [0, 0], [4, 7], [5, 8], [6, 9], [0, 0]]
    ]


def test_a_folded_product_is_rounded_once() -> None:
    torch.manual_seed(0)
    w_down, w_up, w_p = (
        torch.randn(2, *shape).bfloat16() for shape in ((8, 64), (64, 16), (8, 16))
    )
    (gate_up,) = _fold(16, w_down, w_up, w_p)
    exact = (w_down.double() @ w_up.double()).transpose(1, 2)
    assert torch.equal(gate_up[:, :16], exact.bfloat16())


def test_a_tensor_of_all_experts_is_read_once() -> None:
    config = parse_command_line(flags(SMALL | options("topk")))
    steps = plain_steps(routed(config, 0, ExpertNames()))
    assert len({key for step in steps for key in step.keys}) == len(steps) == 3
    gate_up = next(step for step in steps if "gate_up" in step.keys[0])
    tensor = torch.arange(4 * 32 * 2 * 32).view(4, 32, 2, 32)
    results = dict(zip([name for name, _ in gate_up.results], gate_up.make(tensor), strict=True))
    assert len(results) == 8
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(results[f"{name}.gate_proj.weight"], tensor[expert, :, 0].T)
        assert torch.equal(results[f"{name}.up_proj.weight"], tensor[expert, :, 1].T)


def test_the_bias_of_routing_free_is_subtracted_from_norms() -> None:
    """An exported gate adds its bias, as to the scores of systems with cutoffs."""
    config = parse_command_line(flags(SMALL | options("routing_free")))
    steps = own_steps(config, 300, fold=False)
    (step,) = (step for step in steps if step.keys == ("decoder.layers.0.mlp.b_E",))
    (bias,) = step.make(torch.tensor([0.5, 0.0, -2.0, 1.0]))
    assert step.results == (("model.layers.0.mlp.gate.expert_bias", (4,)),)
    assert bias.tolist() == [-0.5, 0.0, 2.0, -1.0]


@pytest.mark.parametrize(
    ("system", "fold", "width"),
    [
        ("aoe", False, 20),
        ("aoe", True, 32),
        ("topk", False, 32),
        ("uoe", False, 24),
        ("hash", False, 32),
        ("aoe, free experts", True, 32),
    ],
)
def test_names_shapes_and_width(system: str, fold: bool, width: int) -> None:
    config = parse_command_line(flags(SMALL | options(system)))
    steps = own_steps(config, 300, fold=fold)
    names = [name for step in steps for name, _ in step.results]
    assert len(names) == len({*names})
    fields = own_config_json(config, 300, fold=fold)
    assert fields["moe_intermediate_size"] == width
    shapes = dict(pair for step in steps for pair in step.results)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (4, 32, width)
    assert shapes["model.embed_tokens.weight"] == (300, 32)


def test_routing_neurons_stand_expert_by_expert() -> None:
    config = parse_command_line(flags(SMALL | options("uoe")))
    names = {name: step for step in own_steps(config, 300, fold=False) for name, _ in step.results}
    (w_in,) = names["model.layers.0.mlp.gate.neurons_in"].make(
        torch.arange(4 * 32 * 2 * 8).view(4, 32, 2, 8)
    )
    (w_out,) = names["model.layers.0.mlp.gate.neurons_out"].make(
        torch.arange(4 * 8 * 32).view(4, 8, 32)
    )
    expert, width, half, neuron = 2, 5, 1, 3
    assert (
        w_in[half * 32 + expert * 8 + neuron, width] == ((expert * 32 + width) * 2 + half) * 8 + 3
    )
    assert w_out[width, expert * 8 + neuron] == (expert * 8 + neuron) * 32 + width


def test_how_much_larger_folded_experts_are() -> None:
    """docs/huggingface.md: by 1.43 at d = 768, d_low = 64 and d_wide = 2048."""
    sizes = {"hidden_size": 768, "aoe_low_rank_size": 64, "aoe_wide_size": 2048}
    config = parse_command_line(flags(SMALL | options("aoe") | sizes))

    def size(fold: bool) -> int:
        """Of all experts, W_down included, which both forms keep in the gate."""
        results = (result for step in own_steps(config, 300, fold=fold) for result in step.results)
        return sum(math.prod(shape) for name, shape in results if ".mlp." in name)

    assert round(size(True) / size(False), 2) == 1.43


def test_the_width_of_folded_experts() -> None:
    config = parse_command_line(flags(SMALL | options("aoe")))
    for width, expected in ((1, 16), (16, 16), (17, 32), (4393, 4400)):
        selection = dataclasses.replace(config.selection, aoe_wide_size=width)
        assert folded_width(dataclasses.replace(config, selection=selection)) == expected
