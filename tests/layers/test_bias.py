"""What moves the cutoffs or the bias of a layer: the steps of training, and nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_parallel.config import Selection
from tests.layers.cases import aoe, aoe_threshold, direction, relu, threshold, topk, uoe
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


def test_only_forward_passes_of_training_count_for_a_controller() -> None:
    """And not the first pass of a recomputation, or an evaluation."""
    case = Case(relu(), setting=0.3)
    given = values(case)
    layer = build(case, given, torch.float32, "reference")
    counts = []
    for training, gradients in ((True, True), (True, False), (False, True)):
        with torch.set_grad_enabled(gradients):
            layer.train(training)(torch.from_numpy(given["x"]).float())
        counts.append(layer.controller.counts.tolist())
    assert counts[0][0] > 0 and counts[0][1] == case.tokens
    assert counts == [counts[0]] * 3


QUANTILE = {"moe_router_enable_expert_bias": True, "moe_router_bias_update": "quantile"}
SIGN = {"moe_router_enable_expert_bias": True}


@pytest.mark.parametrize("select", [topk, aoe, uoe])
def test_a_micro_batch_counts_once_in_a_quantile_bias(select: Callable[..., Selection]) -> None:
    """The micro-batch by itself, also before it is recomputed, and between evaluations."""
    case = Case(select(k=1, **QUANTILE))
    given = values(case)
    other = given | {"x": 3 * given["x"][::-1]}
    once, repeated = (build(case, given, torch.float32, "reference") for _ in range(2))
    run(once.train(), given, direction(case))
    once.after_step()
    run(repeated.eval(), other, direction(case))
    with torch.no_grad():
        repeated.train()(torch.from_numpy(given["x"]).float())
    run(repeated, given, direction(case))
    run(repeated.eval(), other, direction(case))
    repeated.after_step()
    assert (once.bias.bias_E != 0).any()
    assert torch.equal(once.bias.bias_E, repeated.bias.bias_E)


@pytest.mark.parametrize("options", [SIGN, QUANTILE])
def test_a_frozen_bias_keeps_its_bits(options: dict[str, object]) -> None:
    """Of 8 steps the last quarter: 7 and 8. The loads are still counted."""
    case = Case(topk(moe_router_bias_frozen_share=0.25, **options))
    given = values(case)
    layer = build(case, given, torch.float32, "reference")
    moved = []
    for done in range(8):
        context = replace(layer.context, iteration=lambda done=done: done, train_iters=8)
        layer.context = context
        before_E = layer.bias.bias_E.clone()
        run(layer.train(), given | {"x": (done + 1) * given["x"]}, direction(case))
        layer.after_step()
        moved.append(not torch.equal(before_E, layer.bias.bias_E))
        assert layer.load.share_E.sum() == 2
    assert moved == [True] * 6 + [False] * 2
