"""--exit-duration-in-mins: when a run leaves, how it says so, and that it loses nothing."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist

from moe_parallel.training import loop as deadline_module
from moe_parallel.training.failure import STARTED
from moe_parallel.training.loop import Deadline
from moe_parallel.training.signals import EXIT_INTERRUPTED
from tests.distributed import run_distributed
from tests.program import (
    SMALL,
    pretrain_here,
    same_bytes,
    small_data,
    stored_tensors,
)

JOB_BEGAN, PROCESS_BEGAN = 940.0, 970.0  # on a clock that shows 1000


class Clock:
    """Stands in for the modules that know the time."""

    def __init__(self) -> None:
        self.now = 500.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline_module, "time", clock)
    monkeypatch.delenv(STARTED, raising=False)

    process = SimpleNamespace(create_time=lambda: PROCESS_BEGAN)
    monkeypatch.setattr(deadline_module.psutil, "Process", lambda: process)
    return clock


def _answers(clock: Clock, deadline: Deadline, *seconds: float) -> list[bool]:
    answers = []
    for each in seconds:
        clock.now += each
        answers.append(deadline.is_near())
    return answers


def test_a_step_that_would_pass_the_limit_is_not_begun(clock: Clock) -> None:
    """30 of 60 s are gone at the start; the longest step decides, not the latest."""
    assert _answers(clock, Deadline(1), 2, 9, 2, 2, 2, 2, 2, 1) == [False] * 7 + [True]
    assert _answers(clock, Deadline(1), 15, 1) == [False, True]


def test_the_job_began_earlier(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED, str(JOB_BEGAN))
    assert _answers(clock, Deadline(1.5), 15) == [False]
    assert _answers(clock, Deadline(1.49), 15) == [True]


def _records(save: Path) -> list[dict[str, Any]]:
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "lm_loss" in record]


def _only_rank_1_is_late() -> None:
    """Rank 0 has all the time; rank 1 has none after its second step."""
    asked = []

    def is_near(_: Deadline) -> bool:
        asked.append(None)
        return dist.get_rank() == 1 and len(asked) >= 2

    Deadline.is_near = is_near  # type: ignore[method-assign]


@pytest.mark.full
def test_all_ranks_leave_after_the_same_step_and_go_on(tmp_path: Path) -> None:
    options = SMALL | small_data(tmp_path) | {"expert_model_parallel_size": 2}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_distributed(2, pretrain_here, [options | {"save": straight}])
    command = options | {"save": stopped, "load": stopped, "exit_duration_in_mins": 600}
    first = run_distributed(2, pretrain_here, [command], _only_rank_1_is_late)
    assert [code for ((code, _),) in first] == [EXIT_INTERRUPTED] * 2
    ((_, output),) = first[0]
    left = "--exit-duration-in-mins 600.0: after iteration 2; continue with --load"
    assert f"{left} {stopped}\n" in output
    assert [path.name for path in stopped.glob("iter_*")] == ["iter_0000002"]
    second = run_distributed(2, pretrain_here, [command])
    assert [code for ((code, _),) in second] == [0, 0]
    assert [r["lm_loss"] for r in _records(stopped)] == [r["lm_loss"] for r in _records(straight)]
    last = f"iter_{SMALL['train_iters']:07d}"
    assert same_bytes(stored_tensors(stopped / last), stored_tensors(straight / last))


def test_a_limit_that_has_passed_leaves_one_step_a_start_and_spares_the_last(
    tmp_path: Path,
) -> None:
    """Each start makes progress, so a job that is requeued comes to its end, with code 0."""
    save = tmp_path / "run"
    command = SMALL | small_data(tmp_path) | {"save": save, "load": save, "train_iters": 3}
    runs = [command | {"exit_duration_in_mins": 0.0001}] * 3
    (ends,) = run_distributed(1, pretrain_here, runs)
    assert [code for code, _ in ends] == [EXIT_INTERRUPTED, EXIT_INTERRUPTED, 0]
    assert [r["iteration"] for r in _records(save)] == [1, 2, 3]
    assert os.path.exists(save / "run.png")
