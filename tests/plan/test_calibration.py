"""Constants of a node are found again from the speeds that a plan with them gives."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.plan.calibration import CALL_TIME, FP8, KERNEL_TIME, NodeCalibration, calibrations
from moe_parallel.plan.cluster import NODES, Cluster, Efficiency
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.published import KernelTimes, PublishedRun, read_published
from moe_parallel.plan.shape import PlannedExperts, Shape, swiglu_weights
from moe_parallel.plan.software import Software

FILE = Path(__file__).parents[2] / "docs/results/planner/published_runs.json"
DENSE = Shape((False,) * 2, 4096, 32, 8, 128, 14336, 32000, False, 8192, bf16=True, fp8_linear=True)
EXPERTS = PlannedExperts(64, 4, 512, swiglu_weights(1024, 64, 512))
MOE = Shape(
    (True,) * 2, 1024, 8, 8, 128, 0, 32000, False, 1024, bf16=True, experts=EXPERTS,
    fp8_linear=True, fp8_experts=True,
)  # fmt: skip
LAYOUT = Layout(ranks=8, global_batch=64)
TRUE = replace(Efficiency(), fp8=0.4), KernelTimes(call_time=31e-6, kernel_time=5e-6)
BY_EXPERT = Software(expert_by_expert=True, rounding_calls=1)


def _run(
    shape: Shape, software: Software, calibrates: str | None, node: str = "b200x8", nodes: int = 1
) -> PublishedRun:
    """A run with the speed that TRUE gives it."""
    layout = replace(LAYOUT, ep=1 if shape is DENSE else 8, ranks=8 * nodes)
    cluster = Cluster(NODES[node], nodes)
    run = PublishedRun(f"{node} {nodes}", shape, layout, software, cluster, 1.0, "", "", calibrates)
    return replace(run, tokens_per_gpu=run.planned(*TRUE).tokens_per_gpu)


def _runs() -> list[PublishedRun]:
    graph = replace(BY_EXPERT, graphs=("layer",))
    return [
        _run(DENSE, Software(rounding_calls=4), FP8),
        _run(MOE, BY_EXPERT, CALL_TIME),
        _run(MOE, graph, KERNEL_TIME),
    ]


def test_constants_are_found_from_the_runs_of_one_node() -> None:
    check = _run(MOE, BY_EXPERT, None, nodes=2)
    found = calibrations([*_runs(), check], Efficiency())["b200x8"]
    assert found.efficiency.fp8 == pytest.approx(0.4, rel=1e-3)
    assert found.times.call_time == pytest.approx(31e-6, rel=1e-3)
    assert found.times.kernel_time == pytest.approx(5e-6, rel=1e-3)
    assert abs(found.error(check)) < 1e-3
    assert set(found.runs) == {FP8, CALL_TIME, KERNEL_TIME}


def test_checks_have_no_part_in_the_fit() -> None:
    check = _run(MOE, BY_EXPERT, None, nodes=2)
    slower = replace(check, tokens_per_gpu=check.tokens_per_gpu / 2)
    found = [calibrations([*_runs(), each], Efficiency()) for each in (check, slower)]
    assert found[0] == found[1]
    assert found[1]["b200x8"].error(slower) == pytest.approx(1.0, abs=5e-3)


def test_another_kind_of_node_lends_its_seconds_and_no_share() -> None:
    other = _run(MOE, BY_EXPERT, None, "h100x8", 2)
    found = calibrations([*_runs(), other], Efficiency())["h100x8"]
    assert found.times.call_time == pytest.approx(31e-6, rel=1e-3)
    assert found.times.kernel_time == pytest.approx(5e-6, rel=1e-3)
    assert found.efficiency == Efficiency()
    assert set(found.runs) == {CALL_TIME, KERNEL_TIME}


def test_without_runs_of_one_node_nothing_is_changed() -> None:
    check = _run(MOE, BY_EXPERT, None, nodes=2)
    found = calibrations([check], Efficiency())["b200x8"]
    assert (found.efficiency, found.runs) == (Efficiency(), {})
    assert found.times.call_time == NODES["b200x8"].call_time


def test_runs_that_cannot_calibrate_are_told() -> None:
    with pytest.raises(InputError, match="b200x8 2 calibrates 'fp8' on 2 nodes"):
        calibrations([_run(DENSE, Software(), FP8, nodes=2)], Efficiency())
    with pytest.raises(InputError, match="calibrates 'x' on 1 nodes"):
        calibrations([_run(DENSE, Software(), "x")], Efficiency())
    fast = replace(_run(DENSE, Software(), FP8), tokens_per_gpu=1e9)
    with pytest.raises(InputError, match="no fp8 from 0.01 to 1 gives the speed of b200x8 1"):
        calibrations([fast], Efficiency())


@pytest.fixture(scope="module")
def published() -> tuple[list[PublishedRun], dict[str, NodeCalibration]]:
    runs = read_published(FILE)
    return runs, calibrations(runs, Efficiency())


@pytest.mark.full
def test_the_published_runs_calibrate_both_kinds_of_node(published) -> None:
    runs, found = published
    assert set(found["b200x8"].runs) == set(found["h100x8"].runs) == {FP8, CALL_TIME, KERNEL_TIME}
    for run in runs:
        if run.calibrates:
            assert run.cluster.nodes == 1
            assert abs(found[run.cluster.node.name].error(run)) < 1e-3, run.name
    assert sum(run.cluster.nodes > 1 for run in runs) == 16


@pytest.mark.full
def test_the_page_has_the_errors_of_every_run(published) -> None:
    page = (FILE.parents[2] / "scaling.md").read_text(encoding="utf-8")
    runs, found = published
    for run in runs:
        planned = run.planned(Efficiency()).tokens_per_gpu
        error = 100 * (planned / run.tokens_per_gpu - 1)
        fitted = 100 * found[run.cluster.node.name].error(run)
        last = "(fitted)" if run.calibrates else f"{fitted:+.1f}%"
        if not run.calibrates and abs(fitted) <= 10:
            last = f"**{last}**"
        row = f" | {run.tokens_per_gpu:,.0f} | {planned:,.0f} | {error:+.1f}% | {last} |\n"
        assert row in page, run.name
