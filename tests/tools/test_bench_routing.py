"""A model under forced routing: rows, memory and their table, and the program."""

from typing import Any

import pytest

from moe_parallel.ops import extension
from tests.distributed import run_distributed
from tools.bench.forced import ForcedWorkload, Measured, Task, format_workloads, measure_workloads
from tools.bench.routing import main

WORKLOADS = (
    ForcedWorkload("balanced", None),
    ForcedWorkload("hot:1", None),
    ForcedWorkload("hot:1", 0.1),
)


def test_a_table_worked_by_hand() -> None:
    task = Task("topk", WORKLOADS, 8, 8, turns=3)
    mib = 2**20
    first = [
        Measured(50, [1.0, 2.0, 1.0], 4 * mib, mib),
        Measured(90, [3.0, 3.0, 4.0], 10 * mib, 3 * mib),
        Measured(90, [6.0, 6.0, 5.0], 3 * mib, mib),
    ]
    second = [
        Measured(50, [0.5, 1.0, 2.0], 4 * mib, 2 * mib),
        Measured(10, [1.0, 1.0, 9.0], mib, mib),
        Measured(10, [1.0, 1.0, 1.0], mib, mib),
    ]
    head, *lines = format_workloads(task, [first, second]).splitlines()
    assert head.split()[:3] == ["workload", "max/mean", "CPU"]
    assert [line.split() for line in lines] == [
        # The slowest rank takes 1, 2 and 2 s, then 3, 3 and 9 s, then 6, 6 and 5 s.
        ["balanced", "1.00", "2,000.0", "1.00x", "4.0", "1.00x", "2.0"],
        ["hot:1", "1.80", "3,000.0", "3.00x", "10.0", "2.50x", "3.0"],
        ["hot:1,", "budget", "0.1", "MiB", "1.80", "6,000.0", "3.00x", "3.0", "0.75x", "1.0"],
    ]


@pytest.mark.skipif(not extension.is_built(), reason="the C++ extension is not built")
@pytest.mark.full
@pytest.mark.parametrize("system", ["topk", "aoe"])
def test_a_hot_expert_fills_its_rank_unless_there_is_a_budget(system: str) -> None:
    # When gloo's threads free a message varies, and with it the peak: the experts' activations are
    # made much larger than the messages.
    task = Task(system, WORKLOADS, hidden_size=64, seq_length=224, turns=1)
    ranks = run_distributed(2, measure_workloads, task)
    tokens, layers = 2 * 2 * 224, 2
    for balanced, hot, _ in ranks:
        assert balanced.rows == layers * tokens  # of two choices, half on each rank
        assert len(hot.seconds) == 1 and hot.seconds[0] > 0
    (balanced, hot, bounded), (_, cold, _) = ranks
    # Expert 0 has all first choices, and each of the other seven a seventh of the second ones.
    assert hot.rows == bounded.rows == pytest.approx(layers * tokens * (1 + 3 / 7), abs=16)
    assert hot.rows + cold.rows == 2 * balanced.rows
    assert hot.peak_bytes > 1.1 * balanced.peak_bytes
    assert hot.saved_bytes > 1.1 * balanced.saved_bytes
    assert bounded.peak_bytes < 0.8 * hot.peak_bytes
    assert bounded.saved_bytes < balanced.saved_bytes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--routing", "hot:2"], "--moe-router-force-routing hot is 2: it must be at most 1"),
        (["--budget", "0"], "--budget is 0.0: it must be above 0"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: Any) -> None:
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"routing.py: {message}")
