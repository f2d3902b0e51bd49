"""The tensors of our own architecture: the folded product by hand, and each tensor once."""

import torch

from moe_parallel.config import parse_command_line
from moe_parallel.huggingface.own_model import own_steps
from moe_parallel.huggingface.tensors import _fold
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


def test_the_bias_of_routing_free_is_subtracted_from_norms() -> None:
    """An exported gate adds its bias, as to the scores of systems with cutoffs."""
    config = parse_command_line(flags(SMALL | options("routing_free")))
    steps = own_steps(config, 300, fold=False)
    (step,) = (step for step in steps if step.keys == ("decoder.layers.0.mlp.b_E",))
    (bias,) = step.make(torch.tensor([0.5, 0.0, -2.0, 1.0]))
    assert step.results == (("model.layers.0.mlp.gate.expert_bias", (4,)),)
    assert bias.tolist() == [-0.5, 0.0, 2.0, -1.0]
