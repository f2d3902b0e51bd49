"""A run that continues in its own folder passes over damaged checkpoints."""

import os
import shutil

import pytest

from tests.distributed import RankError, run_distributed
from tests.program import SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.tiers import rest_in_full


def _run_each(commands):
    """(exit code, output) of each command."""
    return [pretrain_here([command])[0] for command in commands]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The flags of a run of 4 iterations that saves each, and its result on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    command = SMALL | small_data(folder) | {"save_interval": 1, "exit_interval": "none"}
    whole = folder / "run"
    run_distributed(2, pretrain_here, [command | {"save": whole, "exit_interval": 3}])
    shutil.copytree(whole, folder / "stopped")
    shutil.rmtree(whole)
    run_distributed(2, pretrain_here, [command | {"save": whole}])
    return command, whole, folder / "stopped"


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _exchange(at):
    other, aside = at.with_name("iter_0000001"), at.with_name("aside")
    for source, target in ((at, aside), (other, at), (aside, other)):
        source.rename(target)


def _cut_log(at):
    log = at.with_name("metrics.jsonl")
    log.write_text(log.read_text().partition('{"iteration": 2')[0])


TRACKER = "latest_checkpointed_iteration.txt"
DAMAGES = {
    "a shard is cut": (lambda at: os.truncate(at / "__1_0.distcp", 100), "__1_0.distcp has 100"),
    "a shard is missing": (lambda at: (at / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a bit of a shard": (lambda at: _flip(at / "__1_0.distcp"), "__1_0.distcp is damaged"),
    "the record": (lambda at: (at / "checkpoint.json").write_text("{"), "checkpoint.json is"),
    "the configuration": (lambda at: _flip(at / "config.yaml"), "config.yaml is damaged"),
    "the record of another iteration": (
        lambda at: shutil.copy(at.with_name("iter_0000002") / "checkpoint.json", at),
        "it was saved at iteration 2 and has been renamed",
    ),
    "exchanged": (_exchange, "it was saved at iteration 1 and has been renamed"),
    "no log": (lambda at: at.with_name("metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "a cut log": (_cut_log, "metrics.jsonl ends at iteration 1, and the run goes on after 3"),
    "a tracker of none": (lambda at: at.with_name(TRACKER).write_text("999"), "says 999, but"),
    "an empty tracker": (lambda at: at.with_name(TRACKER).write_text(""), "says '' instead"),
}
QUICK = ("the configuration", "exchanged", "a cut log", "an empty tracker")
REST = tuple(name for name in DAMAGES if name not in QUICK)


@pytest.mark.parametrize("damages", rest_in_full([QUICK, REST], QUICK), ids=len)
def test_a_run_continues_from_the_newest_good_checkpoint(command, tmp_path, damages):
    command, whole, stopped = command
    runs = [tmp_path / str(i) for i in range(len(damages))]
    for run, name in zip(runs, damages, strict=True):
        shutil.copytree(stopped, run)
        DAMAGES[name][0](run / "iter_0000003")
    commands = [command | {"save": run, "load": run} for run in runs]
    commands[-1] = {"load": runs[-1], "exit_interval": "none"}  # the rest is in the checkpoint
    ends, others = run_distributed(2, _run_each, commands, timeout=600)
    assert [code for code, _ in ends + others] == [0] * 2 * len(runs)
    for run, (_, output), name in zip(runs, ends, damages, strict=True):
        (line,) = [line for line in output.splitlines() if line.startswith("warning: ")]
        assert str(run) in line and DAMAGES[name][1] in line
        iteration = 3 if "log" in name or "tracker" in name else 2
        assert "log" in name or line.endswith(f"; the run continues from iter_000000{iteration}")
        assert f"going on after iteration {iteration}" in output
        for iteration in (3, 4):
            name = f"iter_{iteration:07d}"
            assert same_bytes(stored_tensors(run / name), stored_tensors(whole / name))


@pytest.mark.full
def test_two_damaged_checkpoints_are_passed_over_and_none_is_good(command, tmp_path):
    command, _, stopped = command
    some, none = tmp_path / "some", tmp_path / "none"
    for run, damaged in ((some, (2, 3)), (none, (1, 2, 3))):
        shutil.copytree(stopped, run)
        for iteration in damaged:
            _flip(run / f"iter_{iteration:07d}" / "__0_0.distcp")
    ((code, output),) = run_distributed(2, pretrain_here, [command | {"save": some, "load": some}])[
        0
    ]
    assert code == 0
    assert output.count("the run continues from iter_0000001") == 1
    with pytest.raises(RankError, match="iter_0000003: the checkpoint is incomplete or damaged"):
        run_distributed(2, pretrain_here, [command | {"save": none, "load": none}])


def test_a_checkpoint_that_is_named_is_not_replaced(command, tmp_path):
    command, _, stopped = command
    run = shutil.copytree(stopped, tmp_path / "run")
    _flip(run / "iter_0000003" / "__0_0.distcp")
    named = command | {"save": run, "load": run / "iter_0000003"}
    with pytest.raises(RankError, match="load another one: .*iter_0000002"):
        run_distributed(2, pretrain_here, [named])
