"""argparse with errors of one line, raised as InputError; and the launcher's flags."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from moe_parallel.config.message import as_typed, did_you_mean
from moe_parallel.errors import InputError

#: Options of earlier versions, by name: whether a run that had one is the same without it, and what
#: to use instead. The files of old runs have all options, so those that do nothing are ignored.
GONE = {
    "log_digest": (True, "compare checkpoints by tools/checkpoint.py diff"),
    "aoe_fp8_screening": (False, "norms are always computed exactly"),
    "aoe_send_activations": (True, "the rank of an expert computes C again"),
    "beside": (False, "plan the other file by itself, with --own-layout and the flags of a layout"),
}


def dashed(word: str) -> str:
    """A word of a command line with dashes in its flag: `--num-layers=4` for `--num_layers=4`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def help_of_terminal_width(prog: str) -> argparse.HelpFormatter:
    """Help in two columns, as wide as the terminal but not too wide to read."""
    width = min(98, shutil.get_terminal_size().columns - 2)
    return argparse.HelpFormatter(prog, max_help_position=34, width=width)


class OneLineParser(argparse.ArgumentParser):
    """argparse, but a wrong command line raises InputError instead of printing the usage.

    Flags may have underscores, as in Python and in YAML.
    """

    LISTED = "--help lists all flags"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([dashed(word) for word in words], namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("--"):
                raise self.unknown(word.split("=")[0])
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def unknown(self, word: str, more: dict[str, str] | None = None) -> InputError:
        """The error for a flag that does not exist. `more`: other flags that may be meant."""
        if gone := GONE.get(word.removeprefix("--").replace("-", "_")):
            return InputError(f"{word} is gone: {gone[1]}")
        hint = did_you_mean(word, self.flags | (more or {})) or self.LISTED
        return InputError(f"{as_typed(word)} is not a flag of this program: {hint}")

    @property
    def flags(self) -> dict[str, str]:
        """The flags, also of commands, and their help."""
        parsers: list[argparse.ArgumentParser] = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
        return {
            flag: action.help or ""
            for parser in parsers
            for flag, action in parser._option_string_actions.items()
            if flag.startswith("--")
        }

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())[:300].removeprefix("argument ")
        raise InputError(f"{message}; {self.LISTED}")


SHUTDOWN_TIMEOUT = 600  # seconds

#: Flags of torchrun that this launcher of one node does not have.
_OF_TORCHRUN = (
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr", "--monitor-interval",
    "--log-dir", "--redirects", "--tee", "--local-ranks-filter", "--numa-binding", "--standalone",
)  # fmt: skip


@dataclass(frozen=True)
class LaunchOptions:
    """A command line, divided between the launcher and the program."""

    flag: str | None  # the first that asks for the launcher; None: there is none
    program: tuple[str, ...]  # the words that are not the launcher's
    processes: str  # a number, or auto, cpu or gpu
    max_restarts: int
    shutdown_timeout: int  # seconds


def divide(arguments: Sequence[str]) -> LaunchOptions:
    """The launcher's flags and the program's words. Raises InputError for a wrong value."""
    for word in arguments:
        if dashed(word).split("=")[0] in _OF_TORCHRUN:
            raise InputError(
                f"{word.split('=')[0]} is a flag of torchrun: start several nodes by srun "
                "(docs/cluster.md), or by torchrun itself, without --nproc-per-node here"
            )
    found, program = _parser().parse_known_args(arguments)
    given = {name: value for name, value in vars(found).items() if value is not None}
    options = LaunchOptions(
        next(("--" + name.replace("_", "-") for name in given), None),
        tuple(program),
        given.get("nproc_per_node", "1"),
        given.get("max_restarts", 0),
        given.get("shutdown_timeout", SHUTDOWN_TIMEOUT),
    )
    if not re.fullmatch(r"[1-9]\d*|auto|cpu|gpu", options.processes):
        raise InputError(
            f"--nproc-per-node is {as_typed(options.processes)}: it must be a number, or auto, cpu "
            "or gpu"
        )
    for name in ("max_restarts", "shutdown_timeout"):
        if getattr(options, name) < 0:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} is {getattr(options, name)}: it must be at least 0")
    return options


def launching_flags() -> set[str]:
    """What only a command line can have."""
    return set(_parser().flags)


def _parser() -> OneLineParser:
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    add_launching_flags(parser)
    return parser


def add_launching_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "launching", "The program can start its ranks on one node. These are not YAML keys."
    )

    def add(flag: str, metavar: str, text: str, kind: type = str) -> None:
        group.add_argument(flag, metavar=metavar, help=text, type=kind)

    add("--nproc-per-node", "N", "number of processes on this node, or auto, cpu or gpu")
    add("--max-restarts", "N", "maximum number of restarts from the newest checkpoint after a "
        "lost rank or a bug; --load and --save must name one folder (default: 0)", int)  # fmt: skip
    add("--shutdown-timeout", "SECONDS", "time that the ranks have to save after a signal "
        f"before they are killed (default: {SHUTDOWN_TIMEOUT})", int)  # fmt: skip
