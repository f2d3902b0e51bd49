"""One rank's error ends all ranks, with one message and one exit code."""

import json
import os
import re
import signal
import socket
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
    lost_connection,
    run,
)
from moe_parallel.training.pretrain import main
from moe_parallel.training.signals import (
    EXIT_CTRL_C,
    EXIT_FAILED,
    EXIT_LOST,
    StopRequest,
)
from tests.distributed import run_distributed
from tests.program import SMALL, Ranks, flags, small_data, stored_tensors
from tests.training.tiny_run import Layout, TinyRun


def _job(trouble, before_groups=False, seconds=600):
    """A program like ours: it creates groups, for which it waits for `seconds`, and calls
    `trouble(rank)`."""
    rank = int(os.environ["RANK"])

    def body(channel):
        channel.watch()
        if before_groups:
            trouble(rank)
        connect_ranks(channel.store, "gloo", timedelta(seconds=seconds))
        dist.barrier()
        trouble(rank)
        return 0

    run(body, StopRequest())


def _wait_in_collective(rank):
    dist.all_reduce(torch.ones(1))


def _wait_elsewhere(rank):
    time.sleep(600)


def _bad_input(rank):
    raise InputError("--flag is 3: it must be 4")


def _bug(rank):
    raise ZeroDivisionError("a bug")


def _diverge(rank):
    raise Diverged("iteration 3: the loss is nan")


def _interrupt(rank):
    os.kill(os.getpid(), signal.SIGINT)


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


BAD_INPUT = r"error: --flag is 3: it must be 4\n"


@pytest.mark.parametrize(
    ("trouble", "code", "output"),
    [
        (On1(_bad_input, _wait_in_collective), 2, BAD_INPUT),
        pytest.param(On1(_bad_input, _wait_elsewhere), 2, BAD_INPUT, marks=pytest.mark.full),
        (_bad_input, 2, BAD_INPUT),
        (On1(_diverge, _wait_in_collective), 3, r"error: iteration 3: the loss is nan\n"),
        (
            On1(_bug, _wait_in_collective),
            1,
            r"rank 1: (?s:.*)DivisionError: a bug\n\n",
        ),
        (
            On1(_interrupt, _wait_elsewhere),
            EXIT_CTRL_C,
            "stopped by SIGINT before training began; there was nothing to save\n",
        ),
    ],
    ids=["one waits", "one sleeps", "both", "diverged", "a bug", "a signal"],
)
def test_one_message_and_one_code(tmp_path, trouble, code, output):
    codes, said = _end(tmp_path, trouble)
    assert codes == [code, code]
    assert re.fullmatch(output, said)


@pytest.mark.full
def test_a_rank_that_does_not_come_is_one_line_and_code_76(tmp_path):
    codes, output = _end(tmp_path, On1(_wait_elsewhere, int), True, 1)
    assert codes == [EXIT_LOST, EXIT_LOST]
    assert re.fullmatch(
        rf"error: rank 0 on {socket.gethostname()} has waited in vain for other ranks to start "
        r"\(minutes: 0.0167: .*\): one is slow, .*; start again",
        output.splitlines()[-1],  # torch's own warnings, which the program silences, come before
    )


def test_rank_0_serves_a_store_to_which_no_rank_comes(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unmet, match=f"rank 0 on {socket.gethostname()} has waited in vain"):
        join_store(timedelta(seconds=0.5))


def test_a_rank_that_is_gone_without_a_word(tmp_path):
    codes, output = _end(tmp_path, On1(_die, _wait_in_collective))
    assert codes == [EXIT_LOST, -signal.SIGKILL]
    assert output.startswith(f"error: rank 0 on {socket.gethostname()} cannot continue: lost the ")
    assert output.count("\n") == 1


def test_another_runtime_error_is_no_lost_connection():
    assert lost_connection(RuntimeError("shape '[2, 3]' is invalid for input of size 5")) is None
    assert lost_connection(RuntimeError("NCCL error: invalid usage")) is None


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
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    monkeypatch.setattr("moe_parallel.training.failure.join_store", lambda: client)

    def fail(channel):
        nonlocal server
        del server
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(Left, match=str(EXIT_FAILED)):
        run(fail, StopRequest())
    error = capsys.readouterr().err
    assert error.count("\n") == error.count("the launcher") == lines


def test_a_rank_that_fails_second_waits_for_the_code_of_the_first():
    store = dist.HashStore()
    store.add(_CLAIM, 1)
    first = threading.Timer(0.5, store.set, (_CODE, "3"))
    first.start()
    assert _fail(FailureChannel(store), 2, "not printed") == 3
    first.join()


def _fill(weight):
    with torch.no_grad():
        weight.fill_(float("inf"))


def _fill_its_gradient(weight):
    weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))


def _main_with_poison(poison, arguments):
    """The program; `poison` gets the embedding of rank 1 before its sixth step."""
    step, done = Engine.step, []

    def poisoned(engine, batches):
        done.append(None)
        if len(done) == 6 and dist.get_rank() == 1:
            poison(next(engine.chunks[0].parameters()))
        return step(engine, batches)

    Engine.step = poisoned
    main(arguments)


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        (_fill, r"the loss is (nan|inf) \(on rank 1\)"),
        (_fill_its_gradient, r"the loss is [\d.]+, but the gradient norm is (nan|inf)"),
    ],
)
def test_what_is_not_finite_is_told_and_never_saved(tmp_path, poison, said):
    save = tmp_path / "run"
    options = SMALL | small_data(tmp_path) | {"save": save, "save_interval": 2, "train_iters": 9}
    with Ranks(tmp_path, 2, _main_with_poison, poison, flags(options)) as ranks:
        assert ranks.finish() == [3, 3]
        (error,) = [line for line in ranks.output.splitlines() if "error" in line]
    assert re.fullmatch(
        rf"error: iteration 6: {said}; the last good checkpoint is {save}/iter_0000004", error
    )
    assert (save / "latest_checkpointed_iteration.txt").read_text().split() == ["4"]
    assert sorted(path.name for path in save.glob("*iter_*")) == ["iter_0000002", "iter_0000004"]
    for tensor in stored_tensors(save / "iter_0000004").values():
        assert torch.isfinite(tensor).all()
    records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5]


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
