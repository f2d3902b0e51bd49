"""AoE against its twin in training: the numbers of a run, the comparison of runs, the report."""

from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from tools.bench import training
from tools.bench.training import TwinRun, contenders, ratios

MIB = 2**20


@pytest.mark.full
def test_a_run_ends_after_its_iterations_and_saves_nothing(tmp_path: Path) -> None:
    common = training.ONE_DEVICE | training.SMALL_MODEL | training.random_data(tmp_path)
    common |= {"distributed-backend": "gloo"}
    aoe = contenders(16)[3]
    command = training.command_of(aoe, common, tmp_path / "run", ["--seed", "7"])
    records = training.train(command, tmp_path / "run", 3)
    assert [record["iteration"] for record in records] == [1, 2, 3]
    assert records[-1]["consumed_tokens"] == 3 * 16 * 64
    assert not list((tmp_path / "run").glob("iter_*"))
    assert len(TwinRun.of(records).tokens_per_second) == 1  # the first two are skipped


def test_a_run_that_ends_by_itself_is_told_with_its_last_line(tmp_path: Path) -> None:
    command = [*training.command_of(contenders(16)[0], {}, tmp_path / "run", []), "--lr", "-1"]
    with pytest.raises(InputError, match=r"a run ended by itself: .*--lr"):
        training.train(command, tmp_path / "run", 3)


def test_speed_and_memory_are_compared_within_turns() -> None:
    """The second turn ran on a machine at half its speed: both runs have half."""
    twins = [TwinRun([100.0, 90.0, 110.0], 100 * MIB), TwinRun([50.0], 100 * MIB)]
    ours = [TwinRun([98.0, 20.0, 99.0], 90 * MIB), TwinRun([49.0], 110 * MIB)]
    assert ratios(ours, twins) == pytest.approx((0.98, 1.0))
