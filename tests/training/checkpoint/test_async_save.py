"""Checkpoints that are written during training, on two ranks."""

import os
import signal
import time
from datetime import timedelta

import pytest
from torch import distributed as dist

from moe_parallel.training.checkpoint import saving
from moe_parallel.training.checkpoint import tensors as checkpoint_tensors
from moe_parallel.training.checkpoint.checkpointer import Checkpointer
from moe_parallel.training.checkpoint.inspection import compare
from moe_parallel.training.checkpoint.record import read_record
from moe_parallel.training.checkpoint.saving import Background
from tests.distributed import RankError, run_distributed
from tests.tiers import rest_in_full
from tests.training.slow_writer import slow_writer
from tests.training.tiny_run import AOE, OVERLAP, Layout, TinyRun

EP2 = Layout(2, ep=2)
RUNS = {
    "experts on two ranks": (EP2, {"moe_router_enable_expert_bias": True}),
    "AoE, one rank": (Layout(), AOE | {"bf16": True}),
    "distributed optimizer": (Layout(2, distributed=True), OVERLAP | {"bf16": True}),
    "tensor parallel": (Layout(2, tp=2), {}),
}


def _open(path, layout=EP2, options=None, **more):
    """A run whose checkpoints can be written during training."""
    background = Background(timedelta(seconds=200))
    return TinyRun(layout, path, options=options, background=background, **more)


def _begin(run):
    run.checkpointer.begin_save(*run.state())


def _finish(run):
    return run.checkpointer.background.finish()


def _save_in_both_ways(path, layout, options):
    """Saves every second iteration in `sync`, and during training in `async`."""
    with slow_writer():
        run = _open(path / "async", layout, options)
        waiting = Checkpointer(
            path / "sync",
            keep_last=None,
            fingerprint=run.checkpointer.fingerprint,
            layout=layout.sizes(),
            files={},
        )
        run.steps(1)
        for _ in range(2):
            run.steps(1)
            waiting.save(*run.state())
            _begin(run)
            run.steps(2)  # nothing is written before they are done
            assert run.checkpointer.background.is_writing()
            _finish(run)


@pytest.mark.parametrize("name", rest_in_full(RUNS, *list(RUNS)[:1]))
def test_what_is_written_is_the_state_at_the_iteration_to_the_bit(tmp_path, name):
    layout, options = RUNS[name]
    run_distributed(layout.world, _save_in_both_ways, tmp_path, layout, options)
    for iteration in ("iter_0000002", "iter_0000005"):
        waited, beside = (tmp_path / kind / iteration for kind in ("sync", "async"))
        equal, differences = compare(waited, beside)
        assert differences == {} and equal > 20
        records = [read_record(path) for path in (waited, beside)]
        for record in records:  # the index contains a random name
            assert record["files"].pop(".metadata")["bytes"] > 0
        assert records[0] == records[1]  # with the checksums of the random states, too


def _kill_beside_training(path):
    run = _open(path)
    run.steps(1)
    run.save()
    run.steps(1)
    if dist.get_rank() == 1:
        checkpoint_tensors._WatchedStream._put = _die
    _begin(run)
    run.steps(50)
    _finish(run)


def _die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def _load_then_save(path):
    run = _open(path)
    state = run.load(path)
    run.steps(1)
    _begin(run)
    run.steps(1)
    return state.iteration, _finish(run).name


def test_kill_9_is_as_if_the_save_had_not_begun(tmp_path):
    with pytest.raises(RankError, match=r"died: exit code -9|failed"):
        run_distributed(2, _kill_beside_training, tmp_path)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert run_distributed(2, _load_then_save, tmp_path) == [(1, "iter_0000002")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    ]


def _fail_on_rank_1(path):
    run = _open(path)

    def broken(*args):
        raise LookupError("a bug")

    if dist.get_rank() == 1:
        saving.describe_files = broken
    _begin(run)
    while run.checkpointer.background.is_writing():
        time.sleep(0.01)


def test_an_unknown_error_is_not_lost(tmp_path):
    with pytest.raises(RankError, match="LookupError: a bug|rank 1 failed: a bug"):
        run_distributed(2, _fail_on_rank_1, tmp_path)
    assert not list(tmp_path.glob("iter_*"))
