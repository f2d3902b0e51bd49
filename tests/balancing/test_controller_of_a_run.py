"""What controllers set in a run: the same bits in every layout, also after it is resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parallel.layers import DispatchedLayer
from tests.distributed import run_distributed
from tests.training.tiny_run import Layout, TinyRun

SYSTEMS = {
    "relu": {"expert_selection": "relu", "moe_relu_target_experts": 1.0},
    "top_p": {"expert_selection": "top_p", "moe_top_p_target_experts": 2.0, "moe_top_p": 0.7},
    "routing_free": {
        "expert_selection": "routing_free",
        "aoe_low_rank_size": 8,
        "routing_free_threshold": 1.6,  # about half of the initial norms exceed it
        "routing_free_target_experts": 1.0,
    },
}
NAMES = ("l1_coefficient", "top_p", "balance_coefficient")
#: The first pipeline stage has no layer of experts.
COMMON = {"moe_layer_freq": "[0,0,1,1]", "init_method_std": 0.1}
LAYOUTS = {
    1: {"one rank": (Layout(), {}), "recompute": (Layout(), {"recompute_granularity": "full"})},
    2: {
        "dp2": (Layout(2, distributed=True), {}),
        "tp2": (Layout(2, tp=2), {}),
        "cp2": (Layout(2, cp=2), {}),
        "pp2": (Layout(2, pp=2), {}),
        "pp2, virtual": (Layout(2, pp=2, vpp=2), {}),
    },
}
States = list[list[float]]  # of the controllers of this rank


def _states(run: TinyRun) -> States:
    layers = (layer for chunk in run.engine.chunks for layer in chunk.modules())
    return [
        layer.controller.state.tolist() for layer in layers if isinstance(layer, DispatchedLayer)
    ]


def _train(system: str, world: int, start: Path | None) -> dict[str, tuple[States, States, Any]]:
    """By layout: the states after two steps, and after two more, and what is logged then."""
    found = {}
    for name, (layout, options) in LAYOUTS[world].items():
        run = TinyRun(layout, start, options=SYSTEMS[system] | COMMON | options)
        run.steps(2)
        first = _states(run)
        if name == "one rank":
            run.save()
        if name == "pp2":  # goes on from the checkpoint of one rank
            run.load(start)
        run.steps(2)
        found[name] = first, _states(run), run.engine.controlled()
        run.close()
    return found


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_layout_and_a_resumed_run_set_the_same(system, tmp_path):
    (alone,) = run_distributed(1, _train, system, 1, tmp_path)
    first, last, logged = alone["one rank"]
    assert first[0] != last[0] and first == [first[0]] * 2 and last == [last[0]] * 2
    assert alone["recompute"] == alone["one rank"]
    (name,) = logged
    assert logged[name] == last[0][0] and name in NAMES
    for rank, layouts in enumerate(run_distributed(2, _train, system, 2, tmp_path)):
        for layout, (mine, then, says) in layouts.items():
            number = {"pp2": 2 * rank, "pp2, virtual": 1}.get(layout, 2)
            assert mine == first[:1] * number and then == last[:1] * number, layout
            assert says == logged


def _a_layer() -> DispatchedLayer:
    run = TinyRun(Layout(), Path("unused"), options=SYSTEMS["relu"] | COMMON)
    run.close()
    layers = (layer for chunk in run.engine.chunks for layer in chunk.modules())
    return next(layer for layer in layers if isinstance(layer, DispatchedLayer))


def _counts() -> list[list[float]]:
    """After a forward pass in training, the first pass of a recomputation, and an evaluation."""
    layer, x_SBD = _a_layer(), torch.randn(8, 1, 32, generator=torch.Generator().manual_seed(0))
    counts = []
    for training, gradients in ((True, True), (True, False), (False, True)):
        layer.train(training)
        with torch.set_grad_enabled(gradients):
            layer(x_SBD)
        counts.append(layer.controller.counts.tolist())
    return counts


@pytest.mark.full
def test_only_forward_passes_of_training_count():
    ((first, *others),) = run_distributed(1, _counts)
    assert 0 < first[0] < 32 and first[1] == 8
    assert others == [first] * 2
