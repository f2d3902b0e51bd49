"""A journal contains complete entries in order, even if the disk is full for a while."""

import errno
import os
import resource
import subprocess
from unittest import mock

import pytest

from moe_parallel.telemetry.journal import Journal
from moe_parallel.telemetry.metrics import read_metrics
from moe_parallel.telemetry.sinks import open_telemetry
from tests.distributed import run_distributed
from tests.telemetry.records import example_record


def entry(number: int) -> bytes:
    return (f"{number:03d}" * 100 + "\n").encode()


def test_entries_are_in_the_file_when_append_returns(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(entry(0))
    journal = Journal(path)
    for number in (1, 2):
        journal.append(entry(number))
        assert path.read_bytes() == b"".join(map(entry, range(number + 1)))
    journal.sync()
    journal.close()


def _beyond_the_limit(path):
    """On a rank: files may not grow beyond 1,000 bytes; then the limit is removed."""
    journal = Journal(path)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    sizes = []
    for number in range(6):
        try:
            journal.append(entry(number))
            failure = None
        except OSError as error:
            failure = error.errno
        sizes.append((path.stat().st_size, failure))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    journal.append(entry(6))
    journal.close()
    return sizes


def test_no_half_entry_at_a_limit_and_all_of_them_after_it(tmp_path):
    path = tmp_path / "journal"
    (sizes,) = run_distributed(1, _beyond_the_limit, path)
    fit = [(301, None), (602, None), (903, None)]
    assert sizes == fit + [(903, errno.EFBIG)] * 3
    assert path.read_bytes() == b"".join(map(entry, range(7)))


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "Ctrl-C"])
def test_half_an_entry_that_cannot_be_taken_off_at_once(tmp_path, error):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(entry(0))

    def write_half(data):
        journal._file.write(data[: len(data) // 2])
        raise error

    with (
        mock.patch.object(journal, "_write_whole", write_half),
        mock.patch.object(journal, "_mend"),
        pytest.raises(type(error)),
    ):
        journal.append(entry(1))
    assert path.read_bytes() == entry(0) + entry(1)[: len(entry(1)) // 2]
    journal.append(entry(2))
    journal.close()
    assert path.read_bytes() == entry(0) + entry(1) + entry(2)


def test_memory_is_bounded(tmp_path):
    journal = Journal(tmp_path / "journal")
    with mock.patch.object(journal, "_write_whole", side_effect=FULL):
        for number in range(Journal.KEPT + 5):
            with pytest.raises(OSError, match="No space left"):
                journal.append(b"%d\n" % number)
    journal.close()
    numbers = (tmp_path / "journal").read_text().split()
    assert numbers == [str(number) for number in range(5, Journal.KEPT + 5)]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_logs_on_a_disk_that_is_full_for_a_while(small_disk, capsys):
    with open_telemetry(small_disk / "run", 100) as telemetry:
        telemetry.log(example_record(1))
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(b"x" * 4096)
        for iteration in range(2, 40):  # the last page of the file has room for some more
            telemetry.log(example_record(iteration))
            telemetry.sync()
        written = [record["iteration"] for record in read_metrics(small_disk / "run/metrics.jsonl")]
        assert written == list(range(1, len(written) + 1)) and len(written) < 39
        ballast.unlink()
        telemetry.log(example_record(40))
    records = read_metrics(small_disk / "run/metrics.jsonl")
    assert records == [example_record(iteration) for iteration in range(1, 41)]
    said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert sorted(said) == [
        f"warning: cannot write {small_disk}/run/{name}: No space left on device; "
        "training continues"
        for name in ("metrics.jsonl", "tensorboard")
    ]


def test_a_console_that_cannot_be_written(tmp_path, capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full, mock.patch("sys.stdout", full):
        with open_telemetry(tmp_path, 100, tensorboard=False) as telemetry:
            for iteration in (1, 2):
                telemetry.advance(iteration)
                telemetry.log(example_record(iteration))
                telemetry.say("saved")
        with pytest.raises(OSError, match="No space left"):
            full.flush()  # the console's unwritten text; the end of the program ignores it
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert capsys.readouterr().err == (
        "warning: cannot write standard output: No space left on device; training continues\n"
    )
