"""The benchmark of saves: a small run, and the arithmetic of the table."""

import json
from pathlib import Path

import pytest

from tests.tools.running import run_tool_forked
from tools.bench.save_stalls import Save, SaveTimes, ratios, table

SMALL = (
    "--num-layers", 1, "--hidden-size", 32, "--moe-ffn-hidden-size", 32, "--num-experts", 2,
    "--seq-length", 32, "--micro-batch-size", 2, "--global-batch-size", 2, "--vocab-size", 8192,
)  # fmt: skip


@pytest.mark.full
def test_both_kinds_are_saved_in_turns(tmp_path: Path) -> None:
    samples = tmp_path / "saves.json"
    told = run_tool_forked(
        "bench/saves.py", "--pairs", 2, "--folder", tmp_path, "--json", samples, *SMALL
    )
    assert told.returncode == 0, told.stderr
    assert "on 1 rank; 2 saves of each kind" in told.stdout
    found = json.loads(samples.read_text())
    assert [each["is_async"] for each in found["saves"]] == [False, True, False, True]
    assert all(each["call"] > each["flush"] > 0 for each in found["saves"])
    assert all(each["wait"] == 0 for each in found["saves"] if not each["is_async"])
    assert len(found["steps"]) == 4 * 2 + 1
    assert [path.name for path in tmp_path.iterdir()] == ["saves.json"]  # nothing is left


def test_a_wrong_flag_is_one_line() -> None:
    told = run_tool_forked("bench/saves.py", "--pairs", 0)
    assert told.returncode == 2
    assert told.stderr == "error: --pairs is 0: it must be at least 1\n"


def test_the_ratio_is_that_of_the_medians_of_the_slowest_rank() -> None:
    fast = SaveTimes(
        [Save(False, 0.9, 0.1), Save(True, 0.11, 0.1, 0.01)], [(1.0, False), (1.0, True)]
    )
    slow = SaveTimes(
        [Save(False, 1.1, 0.1), Save(True, 0.12, 0.1, 0.03)], [(2.0, False), (3.0, True)]
    )
    record = SaveTimes.slowest([fast, slow])
    assert [each.stall for each in record.saves] == pytest.approx([1.0, 0.05])
    assert ratios(record) == pytest.approx((0.05, 0.15 / 1.1))
    said = table(record)
    assert "met (goal <= 5%)" in said and "takes 1.50 times as long" in said
    record.saves[1].wait = 0.1
    assert "missed (goal <= 5%)" in table(record)
