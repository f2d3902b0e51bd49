"""A job that the launcher started ends once, with one line and the right exit code."""

import os
import re
import signal
import time

import pytest

from tests.launch.launched import Launched
from tests.tiers import rest_in_full

KILLED = (
    r"error: rank 1 \(process \d+ on .+\) was killed by SIGKILL, as the kernel does when memory "
    r"is full; the other ranks cannot continue without it\n"
)
AGAIN = "starting again: restart 1 of 1\n"
WAIT = "a rank waits\n" * 2


def _end(folder, *arguments):
    """The exit code and the complete output."""
    with Launched(folder, *arguments) as job:
        return job.finish(), job.output


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("done", 0, ""),
        ("bad_input", 2, "error: --flag is 3: it must be 4\n"),
        ("diverge", 3, ""),
        ("bug", 1, ""),
    ],
)
def test_the_code_is_that_of_the_ranks(tmp_path, what, code, line):
    assert _end(tmp_path, what, "1") == (code, line)


@pytest.mark.parametrize(("what", "code"), [("bad_input", 2), ("diverge", 3)])
def test_what_would_end_the_same_way_is_not_started_again(tmp_path, what, code):
    ended, output = _end(tmp_path, "--max-restarts", "1", what, "1")
    assert ended == code
    assert "again" not in output


def test_a_rank_that_is_killed_is_one_line(tmp_path):
    code, output = _end(tmp_path, "die", "1")
    assert code == 137
    assert re.fullmatch(KILLED, output)


def test_a_lost_rank_or_a_bug_is_started_again(tmp_path):
    code, output = _end(tmp_path, "--max-restarts", "1", "die", "1")
    assert code == 0
    assert re.fullmatch(KILLED + AGAIN, output)
    (tmp_path / "bug").mkdir()
    assert _end(tmp_path / "bug", "--max-restarts", "1", "bug", "1") == (0, AGAIN)


SIGNALS = ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"]


@pytest.mark.parametrize("number", rest_in_full(SIGNALS, "SIGUSR1", "SIGINT"))
def test_a_signal_reaches_the_ranks(tmp_path, number):
    with Launched(tmp_path, "--max-restarts", "1", "wait", "0") as job:
        job.wait_for(WAIT)
        os.kill(job.pid, getattr(signal, number))
        assert job.finish() == 75
        assert job.output == WAIT  # the program prints more


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_while_the_ranks_start(tmp_path, number, code):
    with Launched(tmp_path, "--max-restarts", "1", "not_yet", "0") as job:
        job.wait_for(WAIT)
        os.kill(job.pid, getattr(signal, number))
        assert job.finish() == code
        said = job.output.removeprefix(WAIT)
        assert said == f"stopped by {number} before training began; there was nothing to save\n"


@pytest.mark.full
def test_a_rank_that_leaves_alone_does_not_keep_the_others(tmp_path):
    """The other rank hangs; the launcher kills it and every process that it started."""
    with Launched(tmp_path, "--shutdown-timeout", "1", "hang", "0") as job:
        job.wait_for(WAIT)
        first, second = job.ranks()
        first.kill()
        assert job.finish() == 137
        assert not second.is_running()


def test_ranks_that_do_not_leave_are_killed(tmp_path):
    with Launched(tmp_path, "--shutdown-timeout", "1", "hang", "0") as job:
        job.wait_for(WAIT)
        ranks = job.ranks()
        os.kill(job.pid, signal.SIGTERM)
        assert job.finish() == 137
        assert job.output.removeprefix(WAIT) == (
            "error: the ranks did not leave within 1 s of SIGTERM (--shutdown-timeout) and were "
            "killed\n"
        )
        assert not any(rank.is_running() for rank in ranks)


def test_signals_that_are_repeated_give_no_more_time(tmp_path):
    with Launched(tmp_path, "--shutdown-timeout", "1", "hang", "0") as job:
        job.wait_for(WAIT)
        for _ in range(200):  # ten times as long as the ranks have
            os.kill(job.pid, signal.SIGTERM)
            time.sleep(0.05)
            if "were killed" in job.output:
                break
        else:
            pytest.fail("the ranks run as long as signals come")
        assert job.finish() == 137


@pytest.mark.full
def test_a_second_ctrl_c_does_not_wait(tmp_path):
    with Launched(tmp_path, "hang", "0") as job:
        job.wait_for(WAIT)
        os.kill(job.pid, signal.SIGINT)
        os.kill(job.pid, signal.SIGINT)  # `uv run` and similar programs send the signal again
        time.sleep(2)
        assert job.running()
        os.kill(job.pid, signal.SIGINT)
        assert job.finish() == 130
        assert job.output.removeprefix(WAIT) == (
            "interrupted twice: the ranks were killed, and have not saved\n"
        )
