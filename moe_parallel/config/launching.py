"""The launcher's flags, with torchrun's names, separated from those of the program."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moe_parallel.config.message import as_typed
from moe_parallel.config.one_line_parser import OneLineParser
from moe_parallel.errors import InputError

SHUTDOWN_TIMEOUT = 600  # seconds


@dataclass(frozen=True)
class LaunchOptions:
    """A command line, divided between the launcher and the program."""

    launcher: tuple[str, ...]  # words for torchrun's parser
    program: tuple[str, ...]  # every other word
    nodes: str | None  # of --nnodes, unparsed
    processes: str | None  # of --nproc-per-node, unparsed
    max_restarts: int
    shutdown_timeout: int  # seconds


def divide(arguments: Sequence[str]) -> LaunchOptions:
    """The launcher's words and the program's. Raises InputError for a value of a wrong type."""
    found, program = _parser().parse_known_args(arguments)
    given = {name: value for name, value in vars(found).items() if value is not None}
    restarts = given.get("max_restarts", 0)
    timeout = given.get("shutdown_timeout", SHUTDOWN_TIMEOUT)
    for flag, value in (("--max-restarts", restarts), ("--shutdown-timeout", timeout)):
        if value < 0:
            raise InputError(f"{flag} is {value}: it must be at least 0")
    _check("--nproc-per-node", given, r"[1-9]\d*|auto|cpu|gpu", "a number, or auto, cpu or gpu")
    _check("--nnodes", given, r"[1-9]\d*(:[1-9]\d*)?", "a number, or MIN:MAX")
    launcher = [
        word
        for name, value in given.items()
        if name != "shutdown_timeout"  # older torchruns do not know it, and our agent has it
        for word in (_flag(name), *([] if value is True else [str(value)]))
    ]
    return LaunchOptions(
        tuple(launcher),
        tuple(program),
        given.get("nnodes"),
        given.get("nproc_per_node"),
        restarts,
        timeout,
    )


def _check(flag: str, given: dict[str, str], pattern: str, meaning: str) -> None:
    value = given.get(flag.strip("-").replace("-", "_"), "1")
    if not re.fullmatch(pattern, value):
        raise InputError(f"{flag} is {as_typed(value)}: it must be {meaning}")


def launching_flags() -> set[str]:
    """What only a command line can have."""
    return set(_parser().flags)


def _parser() -> OneLineParser:
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    add_launching_flags(parser)
    return parser


def add_launching_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "launching",
        "The program can start its own ranks. These flags have torchrun's names and meanings and "
        "are not YAML keys.",
    )

    def add(flag: str, metavar: str, text: str, kind: type = str) -> None:
        group.add_argument(flag, metavar=metavar, help=text, type=kind)

    add("--nproc-per-node", "N", "number of processes on this node, or auto, cpu or gpu")
    add("--nnodes", "N|MIN:MAX", "number of nodes (default: 1, or the nodes of the srun step)")
    add("--node-rank", "N", "rank of this node, for the static rendezvous", int)
    add("--master-addr", "HOST", "address of node 0, for the static rendezvous")
    add("--master-port", "N", "port on node 0, for the static rendezvous (default: 29500)", int)
    add("--rdzv-backend", "TEXT", "rendezvous backend: c10d or static")
    add("--rdzv-endpoint", "HOST:PORT", "rendezvous endpoint")
    add("--rdzv-id", "TEXT", "name of the job, the same on every node")
    add(
        "--rdzv-conf",
        "KEY=VALUE,...",
        "additional rendezvous settings, for example join_timeout=1200",
    )
    add("--local-addr", "HOST", "address of this node")
    add("--max-restarts", "N", "maximum number of restarts from the newest checkpoint after a "
        "lost rank or a bug; --load and --save must name one folder (default: 0)", int)  # fmt: skip
    add("--shutdown-timeout", "SECONDS", "time that the ranks have to save after a signal "
        f"before they are killed (default: {SHUTDOWN_TIMEOUT})", int)  # fmt: skip
    add(
        "--monitor-interval",
        "SECONDS",
        "time between two checks of the ranks (default: 0.1)",
        float,
    )
    add("--log-dir", "FOLDER", "folder for the files of --redirects and --tee")
    add("--redirects", "0|1|2|3", "output that goes only to files: 1 stdout, 2 stderr, 3 both")
    add(
        "--tee",
        "0|1|2|3",
        "output that goes to files and to the terminal: 1 stdout, 2 stderr, 3 both",
    )
    add("--local-ranks-filter", "N,N", "ranks of this node whose output the terminal shows")
    add("--numa-binding", "TEXT", "bind processes to the cores near their GPU: node, socket, "
        "exclusive or core-complex")  # fmt: skip
    group.add_argument(
        "--standalone", help="run on one node, with a free port", action="store_true", default=None
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
