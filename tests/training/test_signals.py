"""SIGTERM, SIGUSR1, SIGINT and SIGHUP finish the step, save, and end with a code for each."""

import json
import os
import signal

import pytest
from torch import distributed as dist

from moe_parallel.training.engine import Engine
from moe_parallel.training.pretrain import main
from moe_parallel.training.signals import EXIT_INTERRUPTED, STOP_SIGNALS, Stopped, StopRequest
from tests.program import SMALL, Ranks, flags, small_data
from tests.tiers import rest_in_full


def _main_with_signal(number, rank, step_number, arguments):
    """The program; one rank receives a signal twice in the middle of a step."""
    signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    step, done = Engine.step, []

    def interrupted(engine, batches):
        done.append(None)
        if len(done) == step_number and dist.get_rank() == rank:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return step(engine, batches)

    Engine.step = interrupted
    main(arguments)


@pytest.mark.parametrize(
    "number", rest_in_full(STOP_SIGNALS, signal.SIGTERM), ids=lambda number: number.name
)
def test_one_rank_is_asked_to_stop(tmp_path, number):
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "train_iters": 5}
    rank = 0 if number == signal.SIGTERM else 1
    with Ranks(tmp_path, 2, _main_with_signal, number, rank, 3, flags(options)) as ranks:
        assert ranks.finish() == [EXIT_INTERRUPTED] * 2
        assert ranks.output.endswith(
            f"saved {save}/iter_0000003\n"
            f"stopped by a signal after iteration 3; continue with --load {save}\n"
        )
    assert (save / "latest_checkpointed_iteration.txt").read_text().split() == ["3"]
    with Ranks(tmp_path, 2, main, flags(options | {"load": save})) as ranks:
        assert ranks.finish() == [0, 0]
    lines = (save / "metrics.jsonl").read_text().splitlines()
    iterations = [json.loads(line)["iteration"] for line in lines if "lm_loss" in line]
    assert iterations == [1, 2, 3, 4, 5]


@pytest.mark.full
def test_torchrun_is_gone(tmp_path):
    """SIGUSR1 and SIGKILL end torchrun immediately; its ranks must not continue without it."""
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "train_iters": 100_000}
    with Ranks(tmp_path, 2, main, flags(options)) as ranks:
        ranks.wait_for("iteration      3")
        ranks.lose_store()
        assert ranks.finish() == [EXIT_INTERRUPTED] * 2
    assert len(list(save.glob("iter_*"))) == 1


def test_a_hangup_stops_unless_it_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
        assert signal.signal(signal.SIGHUP, signal.SIG_DFL) == signal.SIG_IGN
        with StopRequest().listening(), pytest.raises(Stopped, match="SIGHUP before training"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_of_the_last_step_is_heeded_after_it():
    with StopRequest().listening() as stop:
        with stop.finishing(lambda: "after iteration 3; go on"):
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Stopped, match="SIGUSR1 after iteration 3"):
            stop.heed()
