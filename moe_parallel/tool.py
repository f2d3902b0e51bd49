"""The base of the programs in tools/: a command line, errors of one line, and exit codes.

    def main(arguments: list[str]) -> int:
        tool = Tool(__file__, __doc__)
        tool.add_argument(...)
        return tool.run(arguments, work)

Exit codes: 0 done, 2 a wrong flag, file or value, 130 Ctrl-C, or what the work itself returns.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moe_parallel.config.command_line import check_flags
from moe_parallel.config.parser import OneLineParser
from moe_parallel.errors import InputError
from moe_parallel.training.signals import EXIT_BAD_INPUT, EXIT_CTRL_C, reader_gone

_SECONDS_BETWEEN_LINES = 30


class _Help(argparse.RawDescriptionHelpFormatter):
    """The description as it is written; a value is N, X, PATH or TEXT, by its type."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names: dict[object, str] = {int: "N", float: "X", Path: "PATH"}
        return names.get(action.type, "TEXT")


class Tool(OneLineParser):
    """The command line of a program, which ends with the exit code that `run` returns."""

    def __init__(
        self,
        file: str,
        docstring: str | None,
        *,
        speaks_as: str | None = None,
        when_interrupted: str = "interrupted",
        **options: Any,
    ) -> None:
        """
        Args:
            file: the program's file, whose name begins each error message.
            docstring: the description at the beginning of `--help`.
            speaks_as: begins each error message instead of the file's name.
            when_interrupted: the message after Ctrl-C.
            options: further arguments of argparse.ArgumentParser.
        """
        options.setdefault("formatter_class", _Help)
        # No abbreviations: a flag of the training program may begin like a flag of this program.
        super().__init__(prog=Path(file).name, description=docstring, allow_abbrev=False, **options)
        self._speaks_as = speaks_as or self.prog
        self._when_interrupted = when_interrupted

    def add_commands(self) -> argparse._SubParsersAction[Any]:
        """The commands of the program, of which a user names one; `command` holds its name."""
        return self.add_subparsers(
            dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser
        )

    def run(self, arguments: list[str], work: Callable[[Namespace], int | None]) -> int:
        """Runs `work(flags)` and returns the exit code."""
        return self._ended(lambda: work(self.parse_args(arguments)))

    def run_with_training_flags(
        self, arguments: list[str], work: Callable[[Namespace, list[str]], int | None]
    ) -> int:
        """Runs `work(own flags, flags of the training program)` and returns the exit code."""
        return self._ended(lambda: work(*self.divide(arguments)))

    def divide(self, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
        """The flags of this program, and those of training. Raises InputError for any other."""
        own, flags = self.parse_known_args(arguments)
        check_flags(flags, self.flags)
        return own, flags

    def _ended(self, work: Callable[[], int | None]) -> int:
        try:
            return work() or 0
        except InputError as error:
            return self._told(str(error), EXIT_BAD_INPUT)
        except BrokenPipeError:
            return reader_gone()
        except OSError as error:
            reason = f"{error.filename or 'writing'}: {error.strerror or error}"
            return self._told(reason, EXIT_BAD_INPUT)
        except KeyboardInterrupt:
            return self._told(self._when_interrupted, EXIT_CTRL_C)

    def _told(self, message: str, code: int) -> int:
        print(f"{self._speaks_as}: {message}", file=sys.stderr)
        return code


def last_line(said: str, otherwise: str = "it printed nothing") -> str:
    """The last line of what a program printed, which is its error if it failed.

    `otherwise`: if it printed nothing.
    """
    lines = said.strip().splitlines()
    return lines[-1] if lines else otherwise


def load_torch() -> None:
    """Imports torch and Megatron-Core, which takes seconds.

    It is called after the flags are checked, so that --help and errors are printed at once.
    """
    from moe_parallel.platform.megatron import import_megatron

    import_megatron()


@contextmanager
def progress(label: str, total: int | None, unit: str = "it") -> Iterator[Callable[[int], object]]:
    """Shows progress, speed and the time left; yields a function that advances it.

    On a terminal it is a bar, elsewhere a line every 30 seconds. `total` None: unknown.
    """
    if not sys.stderr.isatty():
        yield ProgressLines(label, total, unit)
        return
    # Narrow, because a terminal that becomes narrower leaves a part of what it breaks in two.
    shape = "{desc}: {percentage:.0f}% |{bar:10}| {remaining} left, {rate_fmt}" if total else None
    with tqdm(
        total=total, desc=label, unit=unit, unit_scale=True, dynamic_ncols=True, bar_format=shape
    ) as bar:
        yield bar.update


class ProgressLines:
    """Progress in the log of a job: a line on stderr at most every 30 seconds."""

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total, self._unit, self._clock = label, total, unit, clock
        self._done = 0
        self._begun = self._told = clock()

    def __call__(self, count: int) -> None:
        self._done += count
        now = self._clock()
        if now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            print(self._line(now - self._begun), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        rate = self._done / seconds
        done = self._sized(self._done)
        left = ""
        if self._total:
            done += f" of {self._sized(self._total)} ({self._done / self._total:.0%})"
            if rate:
                rest = max(0, self._total - self._done) / rate
                left = f", {tqdm.format_interval(rest)} left"
        return f"{self._label}: {done}, {self._sized(rate)}/s{left}"

    def _sized(self, number: float) -> str:
        return tqdm.format_sizeof(number, self._unit)


def check_load(own: Namespace) -> None:
    """Raises InputError if the flags name no checkpoint."""
    if own.load is None:
        raise InputError("--load is not set: name a run, or one of its checkpoints")


def check_positive(own: Namespace, *names: str) -> None:
    """Raises InputError for a number below 1. `names`: flags without dashes; None is accepted."""
    for name in names:
        value = getattr(own, name.replace("-", "_"))
        if value is not None and value < 1:
            raise InputError(f"--{name} is {value}: it must be at least 1")


def check_output(own: Namespace) -> None:
    """Raises InputError, before the work is done, if --output names a file in no folder."""
    if own.output is not None and not Path(own.output).parent.is_dir():
        raise InputError(f"--output {own.output}: there is no such folder, so create it first")
