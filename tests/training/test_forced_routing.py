"""A forced run in the program: its warning, its records, its trace, and its resumption."""

from pathlib import Path
from typing import Any

import pytest

from moe_parallel.selection.forced import Zipf, shares_of
from moe_parallel.telemetry.metrics import read_metrics, untimed
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data

WARM_UP = {"moe_router_force_routing": "warmup:4", "train_iters": 6, "eval_interval": 3}
CHOICES = SMALL["global_batch_size"] * SMALL["seq_length"] * 2


def loads(records: list[dict[str, Any]]) -> list[list[list[float]]]:
    """For each iteration, the tokens per expert of each layer."""
    trained = [record for record in records if "layers" in record]
    return [[layer["tokens_per_expert"] for layer in record["layers"]] for record in trained]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """The folder of the runs, and their exit codes and output: whole, stopped, resumed, traced."""
    folder = tmp_path_factory.mktemp("forced")
    options = SMALL | small_data(folder) | WARM_UP
    trace = {"moe_router_force_routing": f"trace:{folder / 'whole' / 'metrics.jsonl'}"}
    given = [
        options | {"save": folder / "whole"},
        options | {"save": folder / "cut", "exit_interval": 4},
        options | {"save": folder / "cut", "load": folder / "cut"},
        options | trace | {"save": folder / "traced", "expert_selection": "aoe", "seed": 3},
    ]
    (ended,) = run_distributed(1, pretrain_here, given, timeout=300)
    return folder, ended


@pytest.mark.full
def test_the_run_says_that_it_is_a_benchmark(runs: Any) -> None:
    folder, ended = runs
    assert [code for code, _ in ended] == [0] * 4
    for _, printed in ended:
        assert "warning: experts are forced (" in printed
    for record in read_metrics(folder / "whole" / "metrics.jsonl"):
        assert record["forced_routing"] == "warmup:4"
    config = folder / "whole" / "iter_0000006" / "config.yaml"
    assert "moe-router-force-routing: warmup:4" in config.read_text()


def test_the_load_is_that_of_the_workload(runs: Any) -> None:
    folder, _ = runs
    found = loads(read_metrics(folder / "whole" / "metrics.jsonl"))
    assert len(found) == 6
    for iteration, layers in enumerate(found):
        law = Zipf(max(0.0, 1 - iteration / 4))
        shares = [share / 2**32 for share in shares_of(law.weights(1, 0, 4, 2), 2)]
        for load in layers:
            expected = [CHOICES / 2 * share for share in shares]
            # A sequence rounds by less than one.
            assert load == pytest.approx(expected, abs=SMALL["global_batch_size"])


def test_a_resumed_run_goes_on_with_the_workload(runs: Any) -> None:
    folder, _ = runs
    whole, cut = (
        [untimed(record) for record in read_metrics(folder / name / "metrics.jsonl")]
        for name in ("whole", "cut")
    )
    assert cut == whole


def test_a_trace_gives_the_load_that_was_recorded(runs: Any) -> None:
    folder, _ = runs
    recorded, traced = (
        loads(read_metrics(folder / name / "metrics.jsonl")) for name in ("whole", "traced")
    )
    assert len(traced) == len(recorded)
    for ours, theirs in zip(traced, recorded, strict=True):
        for load, original in zip(ours, theirs, strict=True):
            assert load == pytest.approx(original, abs=SMALL["global_batch_size"])
