"""--load and --save of one folder: the first start and every restart use the same command."""

import json
import os
import signal
from functools import partial

import pytest

from moe_parallel.training.checkpoint import folder as checkpoint_folder
from tests.distributed import RankError, run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.training.stopped_runs import kill_in_step


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def command(data, tmp_path):
    run = tmp_path / "run"
    return SMALL | data | {"save": run, "load": run, "save_interval": 2}


def _iterations(save):
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [record["iteration"] for record in map(json.loads, lines) if "lm_loss" in record]


def _start(command, before=None):
    """The output of rank 0."""
    ((code, output),) = run_distributed(1, pretrain_here, [command], before)[0]
    assert code == 0
    return output


def _kill_before_the_first_tracker_is_written():
    write = checkpoint_folder.write_atomically

    def write_or_die(path, text):
        if path.name == checkpoint_folder.TRACKER:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, text)

    checkpoint_folder.write_atomically = write_or_die


def test_one_command_begins_and_goes_on(command):
    save = command["save"]
    begins = f"no checkpoint in {save} yet: the run begins there\n"
    with pytest.raises(RankError):  # in a folder that does not exist yet
        _start(command, partial(kill_in_step, 2))
    assert (save / "config.yaml").is_file() and _iterations(save) == [1]
    with pytest.raises(RankError):
        _start(command, _kill_before_the_first_tracker_is_written)
    assert [path.name for path in save.glob("iter_*")] == ["iter_0000002"]
    assert not (save / "latest_checkpointed_iteration.txt").exists()
    output = _start(command)
    assert begins not in output and "going on after iteration 2" in output
    assert _iterations(save) == [1, 2, 3, 4]
    assert "4 iterations are done, and --train-iters is 4" in _start(command)
    assert _iterations(save) == [1, 2, 3, 4]


def _first_start(command):
    (end,) = pretrain_here([command])
    return end


def test_what_begins_says_so_on_two_ranks(command, tmp_path):
    save = tmp_path / "other" / ".." / "run"  # the same folder by another name
    (first, output), (second, _) = run_distributed(2, _first_start, command | {"save": save})
    assert (first, second) == (0, 0)
    assert f"no checkpoint in {command['load']} yet: the run begins there\n" in output
    assert "going on" not in output
