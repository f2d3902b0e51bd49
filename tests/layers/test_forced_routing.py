"""The workload of a configuration, and the traces that it reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.layers.given_choices import Forcing, build_forcing, read_loads
from moe_parallel.selection.forced import Balanced, Hot, Trace, WarmUp, Zipf
from moe_parallel.telemetry.router_trace import TraceShape, TraceStep, TraceWriter
from tests.layers.cases import top_p, topk
from tests.layers.single import Case, build, values


def forcing(text: str | None, **options: Any) -> Forcing | None:
    return build_forcing(make_config({"moe_router_force_routing": text, "seed": 5, **options}))


def test_each_name_has_its_workload() -> None:
    assert forcing(None) is None
    assert build_forcing(make_config({"expert_selection": "lory"})) is None
    assert forcing("balanced") == Forcing(Balanced(), 5)
    assert forcing("hot:0.25") == Forcing(Hot(0.25), 5)
    assert forcing("zipf:2", expert_selection="aoe_top_p") == Forcing(Zipf(2), 5)
    assert forcing("warmup:30") == Forcing(WarmUp(30), 5)


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def record(iteration: int, **loads: list[float]) -> dict[str, Any]:
    layers = [{"layer": int(n[1:]), "tokens_per_expert": load} for n, load in loads.items()]
    return {"iteration": iteration, "lm_loss": 2.5, "layers": layers}


def test_a_trace_is_the_metrics_of_a_run(tmp_path: Path) -> None:
    validation = {"iteration": 10, "validation": {"text": {"layers": [{"layer": 2}]}}}
    file = write(
        tmp_path / "metrics.jsonl",
        record(10, l2=[3.0, 1.0], l4=[0.0, 4.0]),
        validation,
        record(15, l2=[1.0, 3.0], l4=[2.0, 2.0]),
    )
    trace = read_loads(file)
    assert trace.ends == [10, 15]
    assert trace.loads == [{2: [3, 1], 4: [0, 4]}, {2: [1, 3], 4: [2, 2]}]
    read = forcing(f"trace:{file}")
    assert read is not None and isinstance(read.workload, Trace)
    assert read.workload.weights(4, 12, 2, 1) == [2, 2]


def test_a_trace_may_be_that_of_choices(tmp_path: Path) -> None:
    shape = TraceShape(layers=(2, 4), num_experts=3, sequences=1, length=2, slots=2)
    writer = TraceWriter(tmp_path / "trace", shape, 6, goes_on=False)
    chosen = np.array([[[[0, 1], [1, -1]]], [[[2, 0], [2, 1]]]])
    for iteration, experts_LNSK in ((7, chosen), (8, np.full_like(chosen, -1))):
        writer.append(iteration, TraceStep(np.zeros(1), experts_LNSK))
    trace = read_loads(str(tmp_path / "trace"))
    assert list(trace.ends) == [7, 8]
    assert trace.loads[0] == {2: [1, 2, 0], 4: [1, 1, 2]}
    assert trace.loads[1] == {2: [0, 0, 0], 4: [0, 0, 0]}
    assert trace.weights(4, 6, 3, 2) == [1, 1, 2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no line with layers: name the metrics.jsonl of a run with experts"),
        ([{"iteration": 3, "validation": {}}], "has no line with layers"),
        ([{"iteration": 3, "layers": [{"layer": 1}]}], "a line .* has no loads: each of its lay"),
        ([{"iteration": 3, "layers": [7]}], "a line .* has no loads"),
        ([record(2, l1=[])], "a line .* has no loads"),
        ([record(2, l1=[1.0, -1.0])], "a line .* has no loads"),
        ([record(0, l1=[1.0])], "iteration 0 is not after 0: sort its lines and count from 1"),
        ([record(4, l1=[1.0]), record(4, l1=[1.0])], "iteration 4 is not after 4: sort its"),
    ],
)
def test_a_file_without_loads_is_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_loads(write(tmp_path / "trace.jsonl", *lines))
    assert "\n" not in str(caught.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.jsonl: No such file or directory: name the folder"):
        forcing(f"trace:{tmp_path / 'none.jsonl'}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "selection",
    [
        topk(moe_router_force_routing="hot:1"),
        topk(moe_router_force_routing="hot:1", moe_router_enable_expert_bias=True),
        top_p(moe_router_force_routing="hot:1"),
    ],
    ids=["topk", "topk, balanced by bias", "top_p"],
)
def test_a_layer_routes_as_it_is_told(selection: Any, training: bool) -> None:
    case = Case(selection, tokens=12, training=training)
    given = values(case)
    layer: Any = build(case, given, torch.float64, "reference")
    with layer.context.statistics.evaluating() as totals:
        layer(torch.from_numpy(given["x"]))
    (summary,) = totals.summaries()
    assert summary["tokens_per_expert"][0] == 12
