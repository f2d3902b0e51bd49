"""A tool as a user runs it, in a separate process."""

import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.distributed import PRELOADED
from tests.program import environment

RunTool = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`python tools/NAME ARGUMENTS...`, without a GPU."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, f"tools/{name}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run_tool_forked(
    name: str, *arguments: object, given: str = "", file_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in a fork of a process that has imported torch and Megatron-Core, which is faster.

    The output of these imports is not captured. `given` is the tool's standard input. A write that
    makes a file larger than `file_bytes` fails, as on a full disk.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    line = [f"tools/{name}", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / stream for stream in ("stdin", "stdout", "stderr")]
        streams[0].write_text(given)
        process = context.Process(target=_be_tool, args=(line, streams, file_bytes))
        with mock.patch.dict(os.environ, environment()):  # for a fork server that starts now
            process.start()
        process.join(240)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{line} does not end")
        _, stdout, stderr = (stream.read_text() for stream in streams)
        return subprocess.CompletedProcess(line, process.exitcode, stdout, stderr)


def _be_tool(line: list[str], streams: list[Path], file_bytes: int | None) -> None:
    for number, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
    sys.stdin = open(0)  # multiprocessing has replaced it
    os.chdir(ROOT)
    os.environ.update(environment())
    sys.argv[:] = line
    if file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # Python would not notice that a .pyc is cut
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    sys.path.insert(0, str(ROOT / Path(line[0]).parent))
    runpy.run_path(line[0], run_name="__main__")
