"""A folder accepts one run at a time."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket

import pytest
import torch.distributed as dist

from moe_parallel.errors import Busy, InputError
from moe_parallel.training import run_lock
from moe_parallel.training.run_lock import LOCK, locked_folder, patience


@pytest.fixture(autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _hold(folder, pipe):
    """Lock the folder like a run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with locked_folder(str(folder)):
        (folder / "metrics.jsonl").touch()
        pipe.send(os.getpid())
        pipe.recv()


@pytest.fixture
def other_run(tmp_path):
    """A process that holds the lock of the folder `run`, and the pipe that ends it."""
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(tmp_path / "run", theirs))
    process.start()
    assert pipe.poll(120)
    yield process, pipe, pipe.recv()
    process.kill()
    process.join()


def _take(folder):
    with locked_folder(str(folder)) as warnings:
        return warnings


def test_a_second_run_is_told_who_is_there(tmp_path, other_run):
    process, pipe, pid = other_run
    folder = tmp_path / "run"
    before = (folder / LOCK).read_text()
    with pytest.raises(InputError) as caught:
        _take(folder)
    assert str(caught.value) == (
        f"--save {folder}: another run is writing there (process {pid} on "
        f"{socket.gethostname()}): end it, wait for it, or name another folder"
    )
    assert (folder / LOCK).read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", LOCK]

    pipe.send("end")
    process.join()
    assert _take(folder) == []
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_start_waits_for_the_one_before_it(tmp_path, other_run, monkeypatch, capsys):
    process, _, pid = other_run
    waits = []

    def end_it(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            os.kill(pid, signal.SIGKILL)
            process.join()

    monkeypatch.setattr(run_lock.time, "sleep", end_it)
    with locked_folder(str(tmp_path / "run"), 100.0) as warnings:
        assert warnings == [] and len(waits) == 3
        assert f"process {os.getpid()} " in (tmp_path / "run" / LOCK).read_text()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"--save {tmp_path}/run: waiting for an earlier start to end (process {pid} on "
        f"{socket.gethostname()}), at most 100 s"
    )


def test_a_start_that_has_waited_asks_to_be_started_again(tmp_path, other_run):
    _, _, pid = other_run
    with pytest.raises(Busy, match=rf"process {pid} on \S+\) and has not ended in 1 s: start"):
        with locked_folder(str(tmp_path / "run"), 1.0):
            pass
    assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {pid} ")


@pytest.mark.parametrize(
    ("environment", "hang_timeout", "seconds"),
    [
        ({}, 300.0, 0),
        ({"SLURM_RESTART_COUNT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, 300.0, 0),
        ({"SLURM_RESTART_COUNT": "2"}, 300.0, 60),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, None, 60),
        ({"SLURM_RESTART_COUNT": "1"}, 6.0, 3),
    ],
)
def test_only_a_job_that_was_started_again_waits(environment, hang_timeout, seconds):
    assert patience(environment, hang_timeout) == seconds


def test_a_killed_run_leaves_no_lock(tmp_path, other_run):
    process, _, pid = other_run
    os.kill(pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "run" / LOCK).exists()
    assert _take(tmp_path / "run") == []
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, number):
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (warning,) = _take(tmp_path / "run")
    assert warning == (
        f"the file system of --save {tmp_path}/run has no locks: take care that no other run "
        "writes there"
    )


def test_a_file_that_its_holder_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def removed_before_the_first_lock(file, operation):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(operation)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before_the_first_lock)
    with locked_folder(str(tmp_path)):
        assert len(calls) == 2 and (tmp_path / LOCK).exists()


def test_a_link_as_lock_file_is_refused(tmp_path):
    (tmp_path / "other").write_text("mine")
    (tmp_path / LOCK).symlink_to("other")
    with pytest.raises(InputError, match=rf"cannot be written \({tmp_path}/{LOCK}: Too many"):
        _take(tmp_path)
    assert (tmp_path / "other").read_text() == "mine"
