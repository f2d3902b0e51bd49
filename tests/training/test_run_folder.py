"""The folder of a run: what continues from it, and with which configuration."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint import folder as checkpoint_folder
from moe_parallel.training.run_config import run_config
from moe_parallel.training.run_folder import fingerprint
from tests.config.test_validate import AOE as FEW_EXPERTS
from tests.config.test_validate import VALID
from tests.distributed import RankError, run_distributed
from tests.program import AOE, SMALL, flags, pretrain_here, small_data
from tests.training.stopped_runs import kill_in_step

ROUTING_FREE = FEW_EXPERTS | {"expert_selection": "routing_free"}


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        (ROUTING_FREE, True),  # theta follows from it
        (ROUTING_FREE | {"routing_free_threshold": 0.5}, False),
        (FEW_EXPERTS | {"moe_copy_experts": 2}, True),  # and the unit of the scores of free experts
        (FEW_EXPERTS, False),
        ({"moe_copy_experts": 2}, False),
    ],
)
def test_initial_weights_matter_where_a_number_follows_from_them(
    options: dict[str, Any], shared: bool
) -> None:
    facts = fingerprint(make_config(VALID | options | {"init_method_std": 0.03}), 100, None)
    assert facts.get("--init-method-std") == (0.03 if shared else None)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of AoE that has completed two of its four iterations."""
    place = tmp_path_factory.mktemp("place")
    options = SMALL | AOE | small_data(place) | {"seed": 7, "save": place / "was_here"}
    options |= {"save_interval": 1, "exit_interval": 2}
    run_distributed(1, pretrain_here, [options])
    return (place / "was_here").rename(place / "run")


def _told(*arguments: object) -> str:
    with pytest.raises(InputError) as caught:
        run_config([str(word) for word in arguments])
    assert str(caught.value).isprintable()
    return str(caught.value)


def _config(*arguments: object):
    return run_config([str(word) for word in arguments]).config


def test_the_folder_of_a_run(run):
    given = run_config(["--load", str(run)])
    assert given.warnings == ()
    assert (given.config.checkpoint.load, given.config.checkpoint.save) == (str(run), str(run))
    assert (given.config.training.seed, given.config.selection.aoe_low_rank_size) == (7, 8)
    assert given.config.checkpoint.save_interval == 1


def test_one_of_its_checkpoints(run, monkeypatch):
    first = run / "iter_0000001"
    assert _config("--load", first).checkpoint.save == str(run)
    assert _config(f"--load={first}/").checkpoint.save == str(run)
    monkeypatch.chdir(first)
    assert _config("--load", ".").checkpoint.save == str(run)
    (run / "best").symlink_to("iter_0000001")
    assert _config("--load", run / "best").checkpoint.save == str(run)


def test_flags_win(run, tmp_path):
    config = _config("--load", run, "--train_iters", "9", "--save", tmp_path)
    assert (config.training.train_iters, config.checkpoint.save) == (9, str(tmp_path))
    assert (
        _config("--load", run, "--save", "none", "--save-interval", "none").checkpoint.save is None
    )


def test_another_run_does_not_save_there(run):
    config = _config("--load", run, "--finetune", "--save-interval", "none")
    assert (config.checkpoint.save, config.training.seed) == (None, 7)
    assert _told("--load", run, "--finetune", "--expert-selection=lory", "--aoe-gate", "all")
    given = ("--load", run, "--moe-use-upcycling", "--save-interval", "none")
    assert _config(*given).checkpoint.save is None


def test_a_checkpoint_that_lies_alone(run, tmp_path):
    alone = shutil.copytree(run / "iter_0000002", tmp_path / "released")
    assert _told("--load", alone) == (
        f"--load {alone} is not in a run folder: give a folder with --save"
    )
    config = _config("--load", alone, "--save", tmp_path / "run")
    assert config.training.seed == 7
    moved = shutil.copytree(run / "iter_0000002", tmp_path / "moved" / "iter_0000002")
    assert _config("--load", moved.parent).checkpoint.save == str(moved.parent)


def test_what_a_flag_leaves_out_is_a_warning(tmp_path):
    file = tmp_path / "aoe.yaml"
    file.write_text("expert-selection: aoe\naoe-low-rank-size: 8\nsave: run\n")
    given = run_config(["--config", str(file), "--expert-selection", "topk"])
    assert given.warnings == (
        f"--expert-selection topk leaves out --aoe-low-rank-size 8, which --config {file} has",
    )


def _go_on(*lines):
    return [pretrain_here([line])[0] for line in lines]


def test_a_moved_run_goes_on_to_its_end(run, tmp_path):
    moved = shutil.copytree(run, tmp_path / "moved", symlinks=True)
    ((left, _), (ended, printed)) = run_distributed(
        1, _go_on, {"load": moved}, {"load": moved, "exit_interval": "none"}
    )[0]
    assert (left, ended) == (0, 0)
    assert (moved / "latest_checkpointed_iteration.txt").read_text().split() == ["4"]
    assert "warning" not in printed
    assert not run.with_name("was_here").exists()
    assert flags({"load": moved}) == ["--load", str(moved)]


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
