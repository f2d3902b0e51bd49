"""A run that was stopped, or killed at any moment, continues as if it had not been."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from moe_parallel.training.checkpoint import tensors as checkpoint_tensors
from tests.distributed import RankError, run_distributed
from tests.program import AOE, SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.tiers import rest_in_full
from tests.training.stopped_runs import kill_in_step

LONG = SMALL | {"train_iters": 20, "expert_model_parallel_size": 2}
SYSTEMS = {
    "aoe-bf16-distributed": LONG | AOE | {"bf16": True, "use_distributed_optimizer": True},
    "topk-fp32": LONG | {"moe_z_loss_coeff": 1e-3},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=rest_in_full(SYSTEMS, "aoe-bf16-distributed"))
def straight(request, tmp_path_factory, data):
    """(options, losses, weights) of 20 iterations without a stop."""
    save = tmp_path_factory.mktemp("straight")
    options = SYSTEMS[request.param] | data
    assert _codes(run_distributed(2, pretrain_here, [options | {"save": save}])) == [0, 0]
    return options, _losses(save), stored_tensors(save / "iter_0000020")


def _codes(ends):
    return [code for of_rank in ends for code, _ in of_rank]


def _records(save: Path):
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def _losses(save: Path):
    """(iteration, loss, gradient norm, learning rate, tokens) of each logged line."""
    names = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_tokens")
    return [tuple(r[name] for name in names) for r in _records(save) if "lm_loss" in r]


def _goes_on_as(straight, save):
    """Load the checkpoint in `save`, train to the end, and compare."""
    options, losses, weights = straight
    run_distributed(2, pretrain_here, [options | {"save": save, "load": save}])
    assert _losses(save) == losses
    assert [iteration for iteration, *_ in losses] == list(range(1, 21))
    assert same_bytes(stored_tensors(save / "iter_0000020"), weights)


@pytest.mark.full
def test_ten_and_ten_are_twenty(straight, tmp_path):
    options, losses, _ = straight
    first = options | {"save": tmp_path, "exit_interval": 10}
    assert _codes(run_distributed(2, pretrain_here, [first])) == [0, 0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().split() == ["10"]
    assert _losses(tmp_path) == losses[:10]
    _goes_on_as(straight, tmp_path)


def _kill_in_the_third_save():
    """Send kill -9 to every rank while it writes its part of the checkpoint."""
    write = checkpoint_tensors._WatchedStream.write

    def write_some_and_die(stream, data):
        if "iter_0000012" in stream._path and stream.tell() > 2000:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(stream, data)

    checkpoint_tensors._WatchedStream.write = write_some_and_die


@pytest.mark.full
def test_kill_9_in_the_middle_of_a_save(straight, tmp_path):
    options, losses, _ = straight
    options = options | {"save": tmp_path, "save_interval": 4, "keep_last": 1}
    with pytest.raises(RankError):
        run_distributed(2, pretrain_here, [options], _kill_in_the_third_save)
    assert [path.name for path in tmp_path.glob(".iter_*")] == [".iter_0000012.writing"]
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000008"]
    assert _losses(tmp_path) == losses[:12]
    _goes_on_as(straight, tmp_path)
    assert not list(tmp_path.glob(".iter_*"))


@pytest.mark.full
def test_kill_9_between_saves(straight, tmp_path):
    options, losses, _ = straight
    options = options | {"save": tmp_path, "save_interval": 5}
    with pytest.raises(RankError):
        run_distributed(2, pretrain_here, [options], partial(kill_in_step, 8))
    assert _losses(tmp_path) == losses[:7]  # two of them after the last checkpoint
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"iteration": 8, "lm_')
    _goes_on_as(straight, tmp_path)
