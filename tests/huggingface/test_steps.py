"""The tensors of our own architecture, by hand."""

import torch

from moe_parallel.config import parse_command_line
from moe_parallel.huggingface.own_model import own_steps
from tests.program import SMALL, flags
from tests.systems import options


def test_the_bias_of_routing_free_is_subtracted_from_norms() -> None:
    """An exported gate adds its bias, as to the scores of systems with cutoffs."""
    config = parse_command_line(flags(SMALL | options("routing_free")))
    steps = own_steps(config, 300, fold=False)
    (step,) = (step for step in steps if step.keys == ("decoder.layers.0.mlp.b_E",))
    (bias,) = step.make(torch.tensor([0.5, 0.0, -2.0, 1.0]))
    assert step.results == (("model.layers.0.mlp.gate.expert_bias", (4,)),)
    assert bias.tolist() == [-0.5, 0.0, 2.0, -1.0]
