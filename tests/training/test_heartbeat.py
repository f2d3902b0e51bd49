"""A rank that makes no progress ends the job: who is to blame, and how it is told."""

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from moe_parallel.telemetry.progress import Phase, Progress
from moe_parallel.training import heartbeat as module
from moe_parallel.training.failure import FailureChannel, join_store, run
from moe_parallel.training.heartbeat import (
    Beat,
    Sighting,
    SteadyClock,
    blame,
    heartbeat,
    is_hung,
    message,
)
from moe_parallel.training.signals import EXIT_LOST, StopRequest
from tests.program import Ranks

LIMIT = 100.0
NOW = "reduce of iteration 5"


def _seen(iteration=5, changes=20, waits=True, silent=1.0, idle=120.0, place=NOW, stack=None):
    beat = Beat(
        number=7,
        host="node3",
        process=4711,
        iteration=iteration,
        changes=changes,
        place=place,
        work=0,
        waits=waits,
        stack=stack,
    )
    return Sighting(beat, silent, idle)


WAITS = _seen()
SLEEPS = _seen(changes=3, waits=False, place="data of iteration 5")
STOPPED = _seen(changes=9, waits=False, silent=121.0)
UNHEARD = Sighting(None, 130.0, 130.0)

TABLES = {
    "one sleeps in data": ([WAITS, WAITS, SLEEPS, WAITS], 2),
    "one sleeps where the others are": ([WAITS, _seen(waits=False), WAITS], 1),
    "one sleeps in the iteration before": ([WAITS, _seen(4, 90, waits=False)], 1),
    # A later pipeline stage has changed its phase less often, and is not to blame for it.
    "the first stage sleeps, the second waits for it": ([SLEEPS, _seen(changes=1)], 0),
    "two sleep, one is behind": ([_seen(changes=9, waits=False), SLEEPS, WAITS], 1),
    "one is stopped, others wait": ([WAITS, STOPPED, WAITS], 1),
    "one is stopped, another computes": ([SLEEPS, STOPPED, WAITS], 1),
    "a host is lost: the first rank of those that are behind": (
        [WAITS, WAITS, STOPPED, _seen(changes=8, waits=False, silent=121.0), STOPPED],
        3,
    ),
    "one was never heard": ([WAITS, STOPPED, UNHEARD], 2),
    "all wait, in different collectives": ([WAITS, _seen(changes=19), WAITS], 1),
    "all wait in the same one": ([WAITS, WAITS], 0),
}


@pytest.mark.parametrize("name", TABLES)
def test_who_is_to_blame(name):
    table, rank = TABLES[name]
    assert is_hung(table, LIMIT)
    assert blame(table, LIMIT) == rank
    assert message(table, LIMIT).startswith(f"error: rank {rank} ")


@pytest.mark.parametrize(
    "table",
    [
        [WAITS, _seen(idle=99.0)],
        # A rank whose heartbeat does not arrive, while training goes on, has a problem of its own.
        [_seen(idle=2.0), STOPPED],
    ],
)
def test_while_one_rank_makes_progress_there_is_no_hang(table):
    assert not is_hung(table, LIMIT)


def test_the_message_about_a_rank_that_sleeps():
    stack = '  File "a.py", line 3, in read\n'
    sleeps = _seen(changes=3, waits=False, place="data of iteration 5", stack=stack)
    assert message([WAITS, sleeps, WAITS], LIMIT) == (
        "error: rank 1 on node3 (process 4711) hangs in data of iteration 5: no rank made progress "
        "for 100 s (--hang-timeout 100); all others are in reduce of iteration 5. Its Python "
        'stack, the innermost call last:\n  File "a.py", line 3, in read'
    )


def test_the_message_about_silent_ranks_says_what_is_not_known():
    text = message([STOPPED, WAITS, STOPPED, WAITS, SLEEPS], LIMIT)
    assert text == (
        "error: rank 0 on node3 (process 4711) is silent for 121 s, last in reduce of iteration 5 "
        "(--hang-timeout 100); also silent: 2: its process is stopped, its host or network is "
        "gone, or native code blocks its interpreter; there is no stack of a silent rank; 3 of 4 "
        "others are in reduce of iteration 5"
    )
    assert "has not been heard since the job began" in message([WAITS, UNHEARD], LIMIT)


def test_the_message_if_every_rank_waits():
    text = message([WAITS, _seen(changes=19)], LIMIT)
    assert "; every rank waits in a collective, and this one is furthest behind" in text


def test_a_beat_is_read_as_it_was_sent():
    beat = _seen(stack='File "ä"\n').beat
    assert Beat.decode(beat.encode().encode()) == beat


TIMEOUT = 6
STEPS = 3


def _job(trouble, at):
    """Steps of two phases that end with a collective; rank `at` has trouble in the last one."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = join_store(rank, world_size)
    progress = Progress()

    def body(channel):
        channel.watch()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("groups", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=10),
        )
        with heartbeat(progress, store, channel, TIMEOUT):
            dist.barrier()
            for step in range(1, STEPS + 1):
                progress.begin_step(step)
                with progress.during(Phase.FORWARD):
                    if rank == at and step == STEPS:
                        time.sleep(TIMEOUT / 4)  # five beats
                        trouble(progress)
                with progress.during(Phase.REDUCE):
                    dist.all_reduce(torch.ones(1))
                progress.end_step()
            dist.barrier()
        return 0

    run(body, FailureChannel(store), StopRequest())


def _sleep_for_ever(progress):
    while True:
        time.sleep(1)


def _stop_itself(progress):
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_the_interpreter(progress):
    ctypes.PyDLL(None).sleep(600)  # a PyDLL keeps the GIL


def _be_slow_but_progress(progress):
    for _ in range(8):
        with progress.during(Phase.DISPATCH):
            time.sleep(1)


def _compute_in_a_save(progress):
    end = time.monotonic() + 3 * TIMEOUT
    with progress.activity(Phase.SAVE):
        while time.monotonic() < end:
            pass


def _write_in_a_save(progress):
    with progress.activity(Phase.SAVE), open(os.devnull, "wb") as file:
        for _ in range(30 * TIMEOUT):
            file.write(bytes(1 << 20))
            time.sleep(0.1)


def _end(folder, trouble, at):
    with Ranks(folder, 2, _job, trouble, at) as ranks:
        return ranks.finish(150), ranks.output


@pytest.mark.full
@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_sleeps_is_named_with_its_stack(tmp_path, at):
    codes, output = _end(tmp_path, _sleep_for_ever, at)
    assert codes == [EXIT_LOST, EXIT_LOST]
    assert re.match(
        rf"error: rank {at} on \S+ \(process \d+\) hangs in forward of iteration 3: no rank made "
        r"progress for 6 s \(--hang-timeout 6\); all others are in reduce of iteration 3\. ",
        output,
    )
    assert output.endswith(", in _sleep_for_ever\n    time.sleep(1)\n")
    assert output.count("error: ") == output.count("_sleep_for_ever") == 1


@pytest.mark.full
def test_a_stopped_rank_is_named_as_silent(tmp_path):
    with Ranks(tmp_path, 2, _job, _stop_itself, 1) as ranks:
        ranks.wait_for("error: ", 150)
        os.kill(ranks.pid(1), signal.SIGKILL)
        assert ranks.finish(60)[0] == EXIT_LOST
        output = ranks.output
    assert re.fullmatch(
        r"error: rank 1 on \S+ \(process \d+\) is silent for \d+ s, last in forward of iteration 3 "
        r"\(--hang-timeout 6\): its process is stopped, .*\n",
        output,
    )


@pytest.mark.full
def test_native_code_that_blocks_the_interpreter_is_shown_by_the_rank_itself(tmp_path):
    with Ranks(tmp_path, 2, _job, _hold_the_interpreter, 1) as ranks:
        ranks.wait_for("error: ", 150)
        os.kill(ranks.pid(1), signal.SIGKILL)
        assert ranks.finish(60)[0] == EXIT_LOST
        output = ranks.output
    assert "in _hold_the_interpreter" in output.split("error: ")[0]
    assert "error: rank 1 on " in output and " is silent for " in output


@pytest.mark.full
@pytest.mark.parametrize("trouble", [_be_slow_but_progress, _compute_in_a_save, _write_in_a_save])
def test_progress_is_no_hang(tmp_path, trouble):
    assert _end(tmp_path, trouble, 1) == ([0, 0], "")


class _Time:
    """A replacement for the module `time`."""

    now = 50.0

    def monotonic(self):
        return self.now


def test_a_steady_clock_does_not_count_the_time_that_its_process_was_stopped(monkeypatch):
    stand_in = _Time()
    monkeypatch.setattr(module, "time", stand_in)
    clock = SteadyClock(2.0)
    stand_in.now += 2.0
    assert clock.read() == 2.0
    stand_in.now += 3600.0
    assert clock.read() <= 2.0 + 5.0
    stand_in.now += 2.0
    assert clock.read() <= 2.0 + 5.0 + 2.0


def test_no_timeout_no_threads():
    with heartbeat(Progress(), dist.HashStore(), None, None), contextlib.suppress(KeyError):
        names = {thread.name for thread in module.threading.enumerate()}
    assert not names & {"heartbeat", "gil-watch", "store-watch"}


class _Alarm:
    """A replacement for the module `faulthandler`."""

    def __init__(self):
        self.is_set, self.times, self.was_set_often = False, 0, threading.Event()

    def dump_traceback_later(self, seconds, file):
        self.is_set = True
        self.times += 1
        if self.times == 3:
            self.was_set_often.set()

    def cancel_dump_traceback_later(self):
        self.is_set = False


class _SilentStore:
    """A store that answers the first beat only."""

    def __init__(self):
        self.answers, self.sets = threading.Event(), 0

    def clone(self):
        return self

    def set(self, key, value):
        self.sets += 1
        if self.sets > 1:
            self.answers.wait()

    def check(self, keys):
        return False

    def multi_get(self, keys):
        return []


def test_the_alarm_goes_on_while_the_store_does_not_answer_and_not_after_the_end(monkeypatch):
    """Stacks are printed if native code holds the interpreter, whatever a beat waits for then."""
    alarm, store = _Alarm(), _SilentStore()
    monkeypatch.setattr(module, "faulthandler", alarm)
    with heartbeat(Progress(), store, None, TIMEOUT):
        assert alarm.was_set_often.wait(60)
        assert alarm.is_set
    assert not alarm.is_set
    watch = [thread for thread in threading.enumerate() if thread.name == "gil-watch"]
    for thread in watch:
        thread.join()
    assert not alarm.is_set
    store.answers.set()
