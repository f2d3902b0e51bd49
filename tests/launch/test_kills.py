"""A killed or stopped run ends immediately, and resuming it gives the same bytes."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.program import (
    EVERY_2,
    LAST,
    SCRIPT,
    SMALL,
    Program,
    flags,
    same_bytes,
    small_data,
    stored_tensors,
)

ENDS = ("error", "stopped")
DISTURBED = Path(__file__).with_name("disturbed.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    """The last checkpoint's tensors of a run without interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Program(folder, 2, _run(folder, data)) as job:
        assert job.finish(600) == 0, job.output
    return _last(folder)


def _run(folder, data):
    """The flags of both a first start and a resume."""
    save = folder / "run"
    return flags(SMALL | data | EVERY_2 | {"save": save, "load": save})


def _last(folder):
    return stored_tensors(folder / "run" / f"iter_{LAST:07d}")


def _check_whole(folder, undisturbed):
    """The bytes are the same, and every iteration occurs once."""
    assert same_bytes(_last(folder), undisturbed)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    trained = [record["iteration"] for record in records if "lm_loss" in record]
    assert trained == list(range(1, LAST + 1))


@pytest.mark.full
def test_a_job_that_lost_a_rank_starts_again_and_ends_the_same(tmp_path, data, undisturbed):
    with Program(tmp_path, 2, ["--max-restarts", "1", *_run(tmp_path, data)]) as job:
        _lose_a_rank(job)
        output = job.output
    assert output.count("was killed by SIGKILL") == 1
    assert "starting again: restart 1 of 1\n" in output
    assert ", going on after iteration 4" in output
    assert "Traceback" not in output
    _check_whole(tmp_path, undisturbed)


def _lose_a_rank(job):
    job.wait_for("iteration  5/12", 600)
    os.kill(job.rank(1), signal.SIGKILL)
    assert job.finish(600) == 0, job.output


def _last_evaluation(job, folder):
    return f"iter_{LAST:07d}" in job.output


def _report(job, folder):
    return "iteration 12/12 | validation" in job.output


LAUNCHER = None
SAVE = "pause_in_a_save"
#: A moment is a pause of the rank that is killed, or of rank 0 (tests/launch/disturbed.py), or what
#: has been printed.
KILLS = [
    ("pause_at_start", LAUNCHER, "SIGTERM", 75),
    ("pause_at_start", 1, "SIGKILL", 137),
    ("pause_in_a_step", LAUNCHER, "SIGKILL", -9),
    (SAVE, LAUNCHER, "SIGUSR1", 75),
    ("pause_in_an_evaluation", 0, "SIGKILL", 137),
    (_last_evaluation, LAUNCHER, "SIGINT", 75),
    (_report, LAUNCHER, "SIGTERM", 75),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "whom", "name", "code"),
    KILLS,
    ids=lambda value: getattr(value, "__name__", str(value)).strip("_"),
)
def test_a_kill(tmp_path, data, undisturbed, moment, whom, name, code):
    _kill_and_go_on(tmp_path, undisturbed, _run(tmp_path, data), moment, whom, name, code)


@pytest.mark.full
@pytest.mark.parametrize(
    ("whom", "name", "code"), [(0, "SIGKILL", 137), (1, "SIGKILL", 137), (LAUNCHER, "SIGTERM", 75)]
)
def test_a_kill_while_a_checkpoint_is_written_beside_training(
    tmp_path, data, undisturbed, whom, name, code
):
    arguments = [*_run(tmp_path, data), "--async-save"]
    _kill_and_go_on(tmp_path, undisturbed, arguments, SAVE, whom, name, code)


def _kill_and_go_on(tmp_path, undisturbed, arguments, moment, whom, name, code):
    """The run is killed at a moment; the same command then ends as the undisturbed run."""
    rank = 0 if whom is LAUNCHER else whom
    disturb = {"DISTURB": f"{moment} {rank}"} if isinstance(moment, str) else {}
    with Program(tmp_path, 2, arguments, disturb, DISTURBED if disturb else SCRIPT) as job:
        while not ((tmp_path / "started").exists() if disturb else moment(job, tmp_path)):
            assert job.running(), job.output
            time.sleep(0.005)
        written = tmp_path / "run" / ".iter_0000004.writing" / f"__{rank}_0.distcp"
        assert moment != SAVE or written.stat().st_size > 0
        os.kill(job.pid if whom is LAUNCHER else job.rank(whom), getattr(signal, name))
        assert job.finish(600) == code
        _wait_for_nobody_in(tmp_path)
        ends = [line for line in job.output.splitlines() if line.startswith(ENDS)]
        # The ranks notice within seconds that the launcher is gone; these may be done by then.
        done = name == "SIGKILL" and whom is LAUNCHER and "figure: " in job.output
        assert len(ends) == 1 - done, job.output
        assert "Traceback" not in job.output
    left = tmp_path / "left"  # says how a pause ended; a killed rank says nothing
    assert not left.exists() or left.read_text() == "asked to stop"
    if moment == SAVE and name == "SIGKILL":
        assert not (tmp_path / "run" / "iter_0000004").exists()
    _check_published(tmp_path / "run")
    with Program(tmp_path, 2, arguments) as job:
        assert job.finish(600) == 0, job.output
        assert "error" not in job.output
    _check_whole(tmp_path, undisturbed)


def _wait_for_nobody_in(folder):
    """Wait until no process has the folder as its working directory: no rank and no child."""

    def found():
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                pass

    deadline = time.monotonic() + 120
    while left := list(found()):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _check_published(save):
    """The checkpoint that the tracker names can be read."""
    tracker = save / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        assert stored_tensors(save / f"iter_{int(tracker.read_text()):07d}")
