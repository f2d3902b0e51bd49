"""A forced run in the program: its warning, its records, and its resumption."""

from pathlib import Path
from typing import Any

import pytest

from moe_parallel.telemetry.metrics import read_metrics, untimed
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data

HOT = {"moe_router_force_routing": "hot:0.75", "train_iters": 6, "eval_interval": 3}
CHOICES = SMALL["global_batch_size"] * SMALL["seq_length"] * 2
SHARES = [0.75 / 2] + [1.25 / 6] * 3  # of all choices


def test_a_forced_run_has_its_load_and_goes_on_with_it(tmp_path: Path) -> None:
    options = SMALL | small_data(tmp_path) | HOT
    given: list[dict[str, Any]] = [
        options | {"save": tmp_path / "whole"},
        options | {"save": tmp_path / "cut", "exit_interval": 4},
        options | {"save": tmp_path / "cut", "load": tmp_path / "cut"},
    ]
    (ended,) = run_distributed(1, pretrain_here, given, timeout=300)
    assert [code for code, _ in ended] == [0] * 3
    assert all("warning: experts are forced (" in printed for _, printed in ended)
    whole, cut = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert list(map(untimed, cut)) == list(map(untimed, whole))
    assert all(record["forced_routing"] == "hot:0.75" for record in whole)
    trained = [record["layers"] for record in whole if "layers" in record]
    assert len(trained) == 6
    for layer in (layer for layers in trained for layer in layers):
        expected = [CHOICES * share for share in SHARES]
        # A sequence rounds by less than one.
        assert layer["tokens_per_expert"] == pytest.approx(expected, abs=SMALL["global_batch_size"])
