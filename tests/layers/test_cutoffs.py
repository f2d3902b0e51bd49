"""What moves the cutoffs of a layer: the steps of training, and nothing else."""

import pytest
import torch

from moe_parallel.config import Selection
from tests.layers.cases import aoe_threshold, direction, threshold
from tests.layers.single import Case, build, run, values


@pytest.mark.parametrize(
    "selection",
    [threshold(moe_threshold_target_experts=1.0), aoe_threshold(moe_threshold_update="sign")],
)
def test_only_forward_passes_of_training_move_the_cutoffs(selection: Selection) -> None:
    case = Case(selection)
    given = values(case)
    layer = build(case, given, torch.float32, "reference")
    start_E = layer.bias.cutoff_E.clone()
    assert (start_E == start_E[0]).all()
    run(layer.eval(), given, direction(case))
    with torch.no_grad():  # the first pass of a recomputation
        layer.train()(torch.from_numpy(given["x"]).float())
    layer.after_step()
    assert torch.equal(layer.bias.cutoff_E, start_E)
    run(layer.train(), given, direction(case))
    assert torch.equal(layer.bias.cutoff_E, start_E)  # a step selects with those before it
    layer.after_step()
    assert not torch.equal(layer.bias.cutoff_E, start_E)
