"""One rank's error ends all ranks, with one message and one exit code."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from moe_parallel.errors import InputError, Unmet
from moe_parallel.training.engine import Engine, NonFinite
from moe_parallel.training.failure import (
    _CLAIM,
    _CODE,
    Diverged,
    FailureChannel,
    _fail,
    connect_ranks,
    join_store,
    leave_with_launcher,
    lost_connection,
    run,
)
from moe_parallel.training.pretrain import main
from moe_parallel.training.signals import (
    EXIT_CTRL_C,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    Stopped,
    StopRequest,
)
from tests.distributed import run_distributed
from tests.program import SMALL, Ranks, flags, small_data, stored_tensors
from tests.tiers import rest_in_full
from tests.training.tiny_run import Layout, TinyRun


def _job(trouble, before_groups=False, seconds=600):
    """A program like ours: it creates groups, for which it waits for `seconds`, and calls
    `trouble(rank)`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = join_store(rank, world_size)

    def body(channel):
        channel.watch()
        if before_groups:
            trouble(rank)
        connect_ranks("gloo", store, rank, world_size, timedelta(seconds=seconds))
        dist.barrier()
        trouble(rank)
        return 0

    run(body, FailureChannel(store), StopRequest())


def _wait_in_collective(rank):
    dist.all_reduce(torch.ones(1))


def _wait_elsewhere(rank):
    time.sleep(600)


def _bad_input(rank):
    raise InputError("--flag is 3: it must be 4")


def _bad_input_late(rank):
    time.sleep(3)  # by now the other rank waits for this one in the store
    _bad_input(rank)


def _bug(rank):
    raise ZeroDivisionError("a bug")


def _diverge(rank):
    raise Diverged("iteration 3: the loss is nan")


def _interrupt(rank):
    os.kill(os.getpid(), signal.SIGINT)


def _terminate(rank):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def _leave(rank):
    sys.exit(5)


def _die(rank):
    os.kill(os.getpid(), signal.SIGKILL)


class On1:
    """One action on rank 1, another on rank 0."""

    def __init__(self, on_1, on_0):
        self.on_1, self.on_0 = on_1, on_0

    def __call__(self, rank):
        (self.on_1 if rank == 1 else self.on_0)(rank)


def _end(folder, trouble, *job):
    """(exit codes, complete output) of a job of two ranks."""
    with Ranks(folder, 2, _job, trouble, *job) as ranks:
        codes = ranks.finish()
        return codes, ranks.output


@pytest.mark.parametrize(
    "waiting", rest_in_full([_wait_in_collective, _wait_elsewhere], _wait_in_collective)
)
def test_bad_input_on_one_rank_is_one_line_and_code_2(tmp_path, waiting):
    codes, output = _end(tmp_path, On1(_bad_input, waiting))
    assert codes == [2, 2]
    assert output == "error: --flag is 3: it must be 4\n"


def test_bad_input_on_every_rank_is_one_line(tmp_path):
    codes, output = _end(tmp_path, _bad_input)
    assert codes == [2, 2]
    assert output == "error: --flag is 3: it must be 4\n"


@pytest.mark.full
def test_a_rank_that_fails_before_there_are_groups(tmp_path):
    codes, output = _end(tmp_path, On1(_bad_input_late, int), True)
    assert codes == [2, 2]
    assert output == "error: --flag is 3: it must be 4\n"


@pytest.mark.full
def test_a_rank_that_does_not_come_is_one_line_and_code_76(tmp_path):
    codes, output = _end(tmp_path, On1(_wait_elsewhere, int), True, 1)
    assert codes == [EXIT_LOST, EXIT_LOST]
    assert re.fullmatch(
        rf"error: rank 0 on {socket.gethostname()} has waited in vain for other ranks to start "
        r"\(minutes: 0.0167: .*\): one is slow, .*; start again",
        output.splitlines()[-1],  # torch's own warnings, which the program silences, come before
    )


def test_a_store_without_the_other_ranks():
    with pytest.raises(Unmet, match="rank 0 .* waited in vain .*--a-flag 0.005: [Ww]ait timeout"):
        connect_ranks("gloo", dist.HashStore(), 0, 2, timedelta(seconds=0.3), "--a-flag")
    assert not dist.is_initialized()


def test_rank_0_serves_a_store_to_which_no_rank_comes(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unmet, match=f"rank 0 on {socket.gethostname()} has waited in vain"):
        join_store(0, 2, timedelta(seconds=0.5))


def test_a_bug_is_one_traceback_and_code_1(tmp_path):
    codes, output = _end(tmp_path, On1(_bug, _wait_in_collective))
    assert codes == [1, 1]
    assert output.count("Traceback") == 1
    assert output.startswith("rank 1: ") and output.endswith("ZeroDivisionError: a bug\n\n")


def test_divergence_is_one_line_and_code_3(tmp_path):
    codes, output = _end(tmp_path, On1(_diverge, _wait_in_collective))
    assert codes == [3, 3]
    assert output == "error: iteration 3: the loss is nan\n"


@pytest.mark.parametrize(
    ("gone", "its_code"),
    [pytest.param(_leave, 5, marks=pytest.mark.full), (_die, -signal.SIGKILL)],
)
def test_a_rank_that_is_gone_without_a_word(tmp_path, gone, its_code):
    codes, output = _end(tmp_path, On1(gone, _wait_in_collective))
    assert codes == [EXIT_LOST, its_code]
    assert output.startswith(f"error: rank 0 on {socket.gethostname()} cannot continue: lost the ")
    assert output.count("\n") == 1


def test_another_runtime_error_is_no_lost_connection():
    assert lost_connection(RuntimeError("shape '[2, 3]' is invalid for input of size 5")) is None
    assert lost_connection(RuntimeError("NCCL error: invalid usage")) is None


@pytest.mark.parametrize(
    ("ask", "name", "code"),
    [
        (_interrupt, "SIGINT", EXIT_CTRL_C),
        pytest.param(_terminate, "SIGTERM", EXIT_INTERRUPTED, marks=pytest.mark.full),
    ],
)
def test_a_signal_before_training(tmp_path, ask, name, code):
    codes, output = _end(tmp_path, On1(ask, _wait_elsewhere))
    assert codes == [code, code]
    assert output == f"stopped by {name} before training began; there was nothing to save\n"


def test_a_channel_without_its_store_tells_all_the_same():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    channel = FailureChannel(client)
    assert channel.code_of_others() is None
    del server
    assert channel.claim(2)
    assert channel.code_of_others() is None


class Left(BaseException):
    """Stands for the end of a process."""


def _leave_now(code):
    raise Left(code)


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_tells_for_all_that_the_launcher_is_gone(monkeypatch, capsys, rank, lines):
    """Another rank left first, so a collective fails, and nobody serves the store."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(os, "_exit", _leave_now)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = FailureChannel(dist.TCPStore("127.0.0.1", server.port, is_master=False))
    del server

    def fail(channel):
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(Left, match=str(EXIT_FAILED)):
        run(fail, channel, StopRequest())
    error = capsys.readouterr().err
    assert error.count("\n") == error.count("the launcher") == lines


def _main_without_launcher(rank):
    """Act as a rank that waits for its store while the launcher is killed."""
    leave_with_launcher(1 if os.getppid() != 1 else 2, StopRequest())
    dist.TCPStore("127.0.0.1", 9, world_size=2, is_master=False, timeout=timedelta(minutes=10))


@pytest.mark.full
def test_a_launcher_that_is_gone_before_there_is_a_store(tmp_path):
    with Ranks(tmp_path, 1, _main_without_launcher, 0) as ranks:
        assert ranks.finish() == [EXIT_INTERRUPTED]
        last = ranks.output.splitlines()[-1]
    assert last == "the launcher is gone before training began; there was nothing to save"


def _main_that_begins_without_launcher(rank):
    """Act as a rank whose launcher is killed while it imports; then a short training begins."""
    stop = StopRequest()
    with stop.listening():
        leave_with_launcher(1 if os.getppid() != 1 else 2, stop)
        time.sleep(2)
        try:
            stop.began(lambda: "after iteration 1")
            time.sleep(3)
            os._exit(0)
        except Stopped as stopped:
            print(stopped, flush=True)
            os._exit(EXIT_INTERRUPTED)


def test_a_launcher_that_is_gone_before_training_which_then_begins(tmp_path):
    with Ranks(tmp_path, 1, _main_that_begins_without_launcher, 0) as ranks:
        assert ranks.finish() == [EXIT_INTERRUPTED]
        assert ranks.output.splitlines()[-1] == "stopped by SIGTERM after iteration 1"


def test_the_first_claim_wins():
    store = dist.HashStore()
    first, second = FailureChannel(store), FailureChannel(store)
    assert first.code_of_others() is None
    assert first.claim(2)
    assert not second.claim(1)
    assert first.code_of_others() == second.code_of_others() == 2


def test_a_rank_that_fails_second_waits_for_the_code_of_the_first():
    store = dist.HashStore()
    store.add(_CLAIM, 1)
    first = threading.Timer(0.5, store.set, (_CODE, "3"))
    first.start()
    assert _fail(FailureChannel(store), 2, "not printed") == 3
    first.join()


def _main_with_poison(value, rank, step_number, arguments):
    """The program; the embedding on one rank is set to `value` before a step."""
    step, done = Engine.step, []

    def poisoned(engine, batches):
        done.append(None)
        if len(done) == step_number and dist.get_rank() == rank:
            with torch.no_grad():
                next(engine.chunks[0].parameters()).fill_(value)
        return step(engine, batches)

    Engine.step = poisoned
    main(arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(tmp_path, value):
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "save_interval": 2, "train_iters": 9}
    with Ranks(tmp_path, 2, _main_with_poison, value, 1, 6, flags(options)) as ranks:
        assert ranks.finish() == [3, 3]
        errors = [line for line in ranks.output.splitlines() if "error" in line]
    (error,) = errors
    assert re.fullmatch(
        r"error: iteration 6: the loss is (nan|inf) \(on rank 1\); "
        rf"the last good checkpoint is {save}/iter_0000004",
        error,
    )
    assert (save / "latest_checkpointed_iteration.txt").read_text().split() == ["4"]
    assert sorted(path.name for path in save.glob("*iter_*")) == ["iter_0000002", "iter_0000004"]
    for tensor in stored_tensors(save / "iter_0000004").values():
        assert torch.isfinite(tensor).all()
    records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5]


def _main_with_poisoned_gradient(rank, step_number, arguments):
    """The program, with an infinite gradient on one rank in a step with a finite loss."""
    step, done = Engine.step, []

    def poisoned(engine, batches):
        done.append(None)
        if len(done) == step_number and dist.get_rank() == rank:
            weight = next(engine.chunks[0].parameters())
            weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
        return step(engine, batches)

    Engine.step = poisoned
    main(arguments)


def test_a_gradient_that_is_not_finite_is_never_saved(tmp_path):
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "save_interval": 2, "train_iters": 9}
    with Ranks(tmp_path, 2, _main_with_poisoned_gradient, 1, 6, flags(options)) as ranks:
        assert ranks.finish() == [3, 3]
        errors = [line for line in ranks.output.splitlines() if "error" in line]
    (error,) = errors
    assert re.fullmatch(
        r"error: iteration 6: the loss is [\d.]+, but the gradient norm is (nan|inf); "
        rf"the last good checkpoint is {save}/iter_0000004",
        error,
    )
    assert sorted(path.name for path in save.glob("*iter_*")) == ["iter_0000002", "iter_0000004"]


def _spoil_a_gradient_after_the_reduction(folder):
    """The error of a step in which one data-parallel rank's own copy of a gradient changes."""
    run = TinyRun(Layout(world=2), folder)
    step = run.engine.optimizer.step

    def spoiled():
        if dist.get_rank() == 1:
            next(run.engine.chunks[0].parameters()).main_grad.fill_(float("nan"))
        return step()

    run.engine.optimizer.step = spoiled
    with pytest.raises(NonFinite) as caught:
        run.steps(1)
    return str(caught.value)


def test_every_rank_learns_of_a_gradient_that_one_has_spoiled(tmp_path):
    ours, theirs = run_distributed(2, _spoil_a_gradient_after_the_reduction, tmp_path)
    assert ours == theirs
    assert re.fullmatch(r"the loss is [\d.]+, but the gradient norm is nan", ours)
