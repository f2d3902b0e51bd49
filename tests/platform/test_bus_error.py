"""A mapped file that is cut while it is read ends the process with one line that names the file."""

import multiprocessing
import os
import signal

import numpy as np
import pytest

from moe_parallel.platform.bus_error import file_at, on_bus_error
from tests.distributed import PRELOADED
from tests.program import SMALL, Program, flags, small_data

MAPS = """\
55d0c0a00000-55d0c0a21000 r--p 00000000 08:01 1311        /usr/bin/python3
7f0000000000-7f0000010000 r--s 00001000 08:01 99          /data/a b/noise.bin (deleted)
7f0000010000-7f0000020000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0           [stack]
""".splitlines()


@pytest.mark.parametrize(
    ("address", "path"),
    [
        (0x7F0000000000, "/data/a b/noise.bin (deleted)"),
        (0x7F000000FFFF, "/data/a b/noise.bin (deleted)"),
        (0x7F0000010000, None),
        (0x7FFD00000010, None),
        (0x10, None),
        (0x55D0C0A20FFF, "/usr/bin/python3"),
    ],
)
def test_the_file_of_an_address(address, path):
    assert file_at(address, MAPS) == path


def _read_after_a_cut(path, output):
    """numpy reads a page that the file no longer has."""

    def end(message):
        output.write_text(message)
        os._exit(5)

    on_bus_error(end)
    values = np.memmap(path, mode="r", dtype=np.int64)
    os.truncate(path, 8)
    values[1000:].sum()  # first in the page at 4096 bytes


def _fail_in_the_handler(path, output):
    on_bus_error(lambda message: 1 / 0)
    values = np.memmap(path, mode="r", dtype=np.int64)
    os.truncate(path, 0)
    values.sum()


def _raise_it(path, output):
    on_bus_error(output.write_text)
    os.kill(os.getpid(), signal.SIGBUS)
    os.kill(os.getpid(), signal.SIGBUS)  # by another process: it has no address


@pytest.fixture
def ended(tmp_path):
    path, output = tmp_path / "noise.bin", tmp_path / "said"
    np.arange(4096, dtype=np.int64).tofile(path)

    def run(function):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        child = context.Process(target=function, args=(path, output))
        child.start()
        child.join(120)
        return child.exitcode, output.read_text() if output.exists() else None

    return run


def test_a_file_that_is_cut_is_named(ended, tmp_path):
    code, said = ended(_read_after_a_cut)
    assert code == 5
    assert said.startswith(f"{tmp_path}/noise.bin cannot be read or written (SIGBUS): ")
    assert "\n" not in said


@pytest.mark.parametrize("function", [_fail_in_the_handler, _raise_it])
def test_otherwise_the_signal_kills(ended, function):
    assert ended(function) == (-signal.SIGBUS, None)


@pytest.mark.full
def test_a_run_whose_data_are_cut_ends_with_code_2(tmp_path):
    options = SMALL | small_data(tmp_path) | {"train_iters": 100_000, "save": tmp_path / "run"}
    with Program(tmp_path, 2, flags(options)) as job:
        job.wait_for("iteration     20")
        os.truncate(tmp_path / "noise.bin", 0)
        assert job.finish(60) == 2, job.output
    (error,) = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {tmp_path}/noise.bin cannot be read or written (SIGBUS): ")
    assert "Traceback" not in job.output
