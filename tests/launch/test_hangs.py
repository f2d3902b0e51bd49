"""A job in which a rank hangs ends with one message that names it, and with code 76."""

import os
import re
import signal

import pytest

from tests.launch.test_srun import Task
from tests.program import SMALL, Program, Torchrun, flags, free_port, small_data
from tests.training.test_stopped_runs import records

SCRIPT = __file__.replace("test_hangs", "disturbed")
TIMEOUT = 6  # far shorter than what the disturbed ranks do
SECONDS = 120  # for a job to end, from its start, on a slow and busy machine

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


def _run(folder, data, **more):
    save = {"save": folder / "run", "load": folder / "run", "save_interval": 4}
    return flags(SMALL | data | save | {"train_iters": 6, "hang_timeout": TIMEOUT} | more)


def _one_error(output):
    (error,) = re.findall("^error: .*", output, re.MULTILINE)
    return error


WHERE = {
    "set_up 0": ("set-up", "begin_run"),
    "data 1": ("data of iteration 3", "_stack"),
    "save 1": ("save after iteration 4", "write_tensors"),
}


@pytest.mark.parametrize("disturb", WHERE)
def test_a_rank_that_sleeps(tmp_path, data, disturb):
    place, function = WHERE[disturb]
    with Program(tmp_path, 2, _run(tmp_path, data), {"DISTURB": disturb}, SCRIPT) as job:
        assert job.finish(SECONDS) == 76, job.output
        output = job.output
    rank = disturb.split()[1]
    assert re.match(
        rf"error: rank {rank} on \S+ \(process \d+\) hangs in {place}: no rank made progress for "
        rf"{TIMEOUT} s \(--hang-timeout {TIMEOUT}\)\. Its Python stack",
        _one_error(output),
    )
    assert f"{function}(" in output and "in sleep_for_ever" in output
    assert output.count("sleep_for_ever") == 1 and "Traceback" not in output


def test_a_rank_that_is_stopped(tmp_path, data):
    endless = _run(tmp_path, data, train_iters=100_000)
    with Program(tmp_path, 2, endless) as job:
        job.wait_for("iteration    100")  # after many beats; the first say `set-up`
        os.kill(job.rank(0), signal.SIGSTOP)
        assert job.finish(SECONDS) == 76, job.output
        error = _one_error(job.output)
    assert re.match(
        r"error: rank 0 on \S+ \(process \d+\) is silent for \d+ s, last in .*iteration "
        r"\d+ \(--hang-timeout 6\): its process is stopped",
        error,
    )
    assert "Traceback" not in job.output


def test_native_code_that_holds_the_interpreter_is_shown_by_the_rank_itself(tmp_path, data):
    held = {"DISTURB": "hold_the_interpreter 1"}
    with Program(tmp_path, 2, _run(tmp_path, data), held, SCRIPT) as job:
        assert job.finish(SECONDS) == 76, job.output
        shown, _, error = job.output.partition("error: ")
    assert "in hold" in shown
    assert re.match(r"rank 1 on .* is silent for ", error)


def test_a_job_that_hung_starts_again(tmp_path, data):
    # The second start must not hang, not even in its report on a busy machine.
    again = ["--max-restarts", "1", *_run(tmp_path, data, hang_timeout=3 * TIMEOUT)]
    with Program(tmp_path, 2, again, {"DISTURB": "data 1"}, SCRIPT) as job:
        assert job.finish(2 * SECONDS) == 0, job.output
        assert "starting again: restart 1 of 1" in job.output
    (tmp_path / "straight").mkdir()
    straight = flags(SMALL | data | {"save": tmp_path / "straight" / "run", "train_iters": 6})
    with Program(tmp_path / "straight", 2, straight) as job:
        assert job.finish(SECONDS) == 0
    assert records(tmp_path / "run") == records(tmp_path / "straight" / "run")


def test_torchrun(tmp_path, data):
    with Torchrun(tmp_path, 2, _run(tmp_path, data), {"DISTURB": "forward 1"}, SCRIPT) as job:
        assert job.finish(SECONDS) == 1
        assert "error: rank 1 on " in _one_error(job.output)
        assert "exitcode  : 76" in job.output


def test_a_stopped_task_that_serves_the_store(tmp_path, data):
    """Nobody can be asked any more: the other task ends by itself."""
    port = free_port()
    endless = _run(tmp_path, data, train_iters=100_000)
    first, second = (Task(tmp_path, task, port, endless) for task in range(2))
    with first, second:
        first.wait_for("iteration    100")
        os.kill(first.pid, signal.SIGSTOP)
        assert second.finish(SECONDS) == 76
        error = _one_error(second.output)
    assert re.match(
        r"error: rank 1 on \S+ hangs, last in .*iteration \d+: the store of the job on "
        r"localhost did not answer for 6 s",
        error,
    )


@pytest.mark.parametrize(
    ("disturb", "options"),
    [
        ("long_save 0", {}),
        ("slow_writes 0", {}),
        ("slow_evaluation 1", {"eval_iters": 4, "eval_interval": 4}),
    ],
)
def test_what_lasts_long_and_goes_on_is_no_hang(tmp_path, data, disturb, options):
    arguments = _run(tmp_path, data, **options)
    with Program(tmp_path, 2, arguments, {"DISTURB": disturb}, SCRIPT) as job:
        assert job.finish(2 * SECONDS) == 0, job.output
