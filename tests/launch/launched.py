"""The launcher in a process that has already imported torch; its ranks do not use torch."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import psutil

from moe_parallel.config.parser import divide
from moe_parallel.launch.launcher import Launcher
from moe_parallel.training.signals import Stopped, StopRequest, code_of
from tests.distributed import PRELOADED
from tests.program import Job, environment

FEW_STEPS = Path(__file__).with_name("few_steps.py")


class Launched(Job):
    """`few_steps.py --nproc-per-node 2 ...`, in a folder that contains the output.

    The context manager ends it on exit.
    """

    def __init__(self, folder: Path, *arguments: str, ranks: int = 2) -> None:
        super().__init__(folder)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "moe_parallel.launch.launcher"])
        line = ["--nproc-per-node", str(ranks), *arguments]
        self._process = context.Process(target=_be_launcher, args=(self._output_file, line))
        with mock.patch.dict(os.environ, environment()):  # for a fork server that starts now
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def running(self) -> bool:
        return self._process.is_alive()

    def finish(self, timeout: float = 600) -> int:
        """Wait until the launcher has ended by itself; returns its exit code."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, self.output
        return self._process.exitcode

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks that are alive."""
        return psutil.Process(self.pid).children()

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *error: object) -> None:
        if self.running():
            for process in self.ranks():
                process.kill()
            self._process.kill()
        self._process.join()


def _be_launcher(output_file: Path, arguments: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and some services ignore it
    output = os.open(output_file, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(output_file.parent)
    os.environ.update(environment())
    stop = StopRequest()
    try:
        with stop.listening():
            code = Launcher(divide(arguments), str(FEW_STEPS)).run()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        code = code_of(stopped)
    sys.exit(code)
