"""What the benchmarks share: flags, their checks, and the record of a run."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_parallel.errors import InputError
from moe_parallel.ops import extension
from moe_parallel.platform.machine import machine, software
from moe_parallel.tool import Tool, check_positive
from moe_parallel.training.signals import EXIT_CTRL_C
from tools.bench.results import BenchRow, format_reasons, write_json

ROOT = Path(__file__).resolve().parents[2]


def about(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The command, when and where it runs, and the load of the machine, as JSON values."""
    return {
        "command": " ".join([f"python tools/bench/{program}", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "software": software(ROOT),
        "load_before": os.getloadavg(),
    }


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def chosen(flag: str, words: list[str] | None, known: list[str], default: list[str]) -> list[str]:
    """The words, in the order of `known`."""
    for word in words or ():
        if word not in known:
            raise InputError(f"{flag} {word!r} is unknown: choose from {', '.join(known)}")
    return default if words is None else [word for word in known if word in words]


def add_flags(tool: Tool) -> None:
    """Adds --turns and --json."""
    tool.add_argument(
        "--turns",
        type=int,
        metavar="N",
        help="turns per row (default: as many as fit into its time)",
    )
    tool.add_argument(
        "--json", type=Path, metavar="FILE", help="write the samples of every row too"
    )


def check(options: argparse.Namespace) -> None:
    """Checks, before the long measurement, the extension and the flags of `add_flags`."""
    if not extension.is_built():
        raise InputError("the C++ extension is not built: run `make set-up`")
    check_positive(options, "turns")
    path: Path | None = options.json
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"--json {path} is a folder: name a file")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"--json {path} cannot be written there: name another file")


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA GPU here; use --device cpu")
    if device == "cuda" and not extension.has_cuda():
        raise InputError("--device cuda: the extension was built without CUDA; build it with nvcc")


def run(
    facts: dict[str, Any], measure: Callable[[list[BenchRow]], None], json: Path | None = None
) -> int:
    """Measures all rows, prints what belongs to all of them, and returns the exit code.

    Args:
        facts: the facts about the run: command, machine, software, instructions, threads.
        measure: appends each row as soon as it is measured, so that an interruption keeps it.
        json: the file for the facts and all samples.
    """
    rows: list[BenchRow] = []
    interrupted = False
    try:
        _print_about(facts)
        measure(rows)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted after {len(rows)} rows", file=sys.stderr)
    facts |= {"load_after": os.getloadavg(), "interrupted": interrupted}
    if reasons := format_reasons(rows):
        print(f"\n{reasons}")
    print(f"\nload {_load_of(facts['load_after'])} after")
    if json is not None:
        write_json(json, facts, rows)
    return EXIT_CTRL_C if interrupted else 0


def _print_about(facts: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in facts["software"].items())
    print(f"{facts['command']}   ({facts['date']})")
    print(f"machine   {facts['machine']}, {facts['instructions']}")
    print(f"software  {versions}")
    print(f"threads   {facts['threads']}, load {_load_of(facts['load_before'])} before", flush=True)


def _load_of(averages: tuple[float, float, float]) -> str:
    return ", ".join(f"{average:.2f}" for average in averages)
