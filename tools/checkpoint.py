"""List, verify, show, compare, delete and rewrite the checkpoints of a run.

    python tools/checkpoint.py list runs/my
    python tools/checkpoint.py verify runs/my
    python tools/checkpoint.py show runs/my/iter_0000200 --tensors
    python tools/checkpoint.py diff runs/my/iter_0000200 runs/other/iter_0000200
    python tools/checkpoint.py prune runs/my --keep-last 2
    python tools/checkpoint.py reshard runs/my/iter_0000200 runs/moved --files 64

A checkpoint needs no conversion for another layout: --load reads it in any. `reshard` only changes
the number of files and the sizes of the parts that a rank reads. Exit codes: 0 done; 1
`diff` found differences; 2 a wrong flag, or `verify` found a damaged checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_positive, load_torch

DIFFERENT = 1
SHOWN = 20  # differences
MEANINGS = {"run": "run folder", "target": "run folder to write to, without this iteration"}


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    commands = tool.add_commands()
    for name, paths, text in (
        ("list", ["run"], "the checkpoints of a run"),
        ("verify", ["run"], "read every file of every checkpoint and compare checksums"),
        ("show", ["checkpoint"], "what a checkpoint holds"),
        ("diff", ["one", "other"], "the tensors that differ, to the bit"),
        ("prune", ["run"], "delete all checkpoints but the latest N"),
        ("reshard", ["checkpoint", "target"], "write a checkpoint anew in other files"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        for path in paths:
            meaning = MEANINGS.get(path, "checkpoint, or run folder for its latest")
            command.add_argument(path, type=Path, metavar=path.upper(), help=meaning)
        if name == "show":
            command.add_argument("--tensors", action="store_true", help="list the tensors too")
        if name == "prune":
            command.add_argument("--keep-last", type=int, required=True, metavar="N",
                help="number of newest checkpoints to keep; if the run went back to an earlier "
                "iteration, those of the abandoned iterations are deleted first")  # fmt: skip
        if name == "reshard":
            command.add_argument("--files", type=int, required=True, metavar="N",
                help="maximum number of files, and of parts of a tensor, such as the "
                "number of ranks that will load it. Weights and optimizer state stay the same to "
                "the bit; the random states and FP8 scales of the ranks are left out")  # fmt: skip
    return tool.run(arguments, _run)


def _run(own: argparse.Namespace) -> int | None:
    if own.command == "prune":
        check_positive(own, "keep-last")
    if own.command == "reshard":
        check_positive(own, "files")
    load_torch()
    from moe_parallel.collective_errors import StorageError

    try:
        return COMMANDS[own.command](own)
    except InputError as error:
        raise InputError(_without_flag(error)) from error
    except StorageError as error:
        raise InputError(f"{error}; `verify` names damaged checkpoints") from error


def _list(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint import inspection as inventory

    folder = inventory.run_checkpoints(own.run)
    latest = None
    try:
        latest = folder.latest()
    except InputError as error:
        print(f"warning: {_without_flag(error)}", file=sys.stderr)
    for found in map(inventory.StoredCheckpoint.of, folder.paths()):
        notes = ["latest"] * (found.path == latest)
        notes += ["incomplete or damaged"] * (not found.is_whole)
        size = inventory.size_text(found.size)
        line = f"{found.path.name}  {size:>10}  {found.written:%Y-%m-%d %H:%M}  {', '.join(notes)}"
        print(line.rstrip())


def _verify(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint import inspection as inventory

    paths = inventory.run_checkpoints(own.run).paths()
    damaged = 0
    for path in paths:
        try:
            files, size = inventory.verify(path)
        except InputError as error:
            damaged += 1
            reason = _without_flag(error).removeprefix(f"{path}: ")
            print(f"{path.name}  {reason}", flush=True)
        else:
            print(f"{path.name}  whole: {files} files, {inventory.size_text(size)}", flush=True)
    if damaged:
        raise InputError(f"{own.run}: {damaged} of {len(paths)} checkpoints are damaged")


def _show(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint import inspection as inventory
    from moe_parallel.training.checkpoint.folder import find_checkpoint
    from moe_parallel.training.checkpoint.index import stored_shapes

    checkpoint = find_checkpoint(own.checkpoint)
    for name, value in list(inventory.checkpoint_facts(checkpoint)):
        print(f"{name:<18}{value}")
    if own.tensors:
        for key, shape in sorted(stored_shapes(checkpoint).items()):
            print(f"  {key}  {list(shape)}")


def _diff(own: argparse.Namespace) -> int:
    from moe_parallel.training.checkpoint.folder import find_checkpoint
    from moe_parallel.training.checkpoint.inspection import compare

    found = compare(find_checkpoint(own.one), find_checkpoint(own.other))
    for difference in found.differences[:SHOWN]:
        print(f"{difference.key}: {difference.how}")
    if len(found.differences) > SHOWN:
        print(f"... and {len(found.differences) - SHOWN} more")
    print(f"{found.equal} tensors are equal, {len(found.differences)} differ")
    return DIFFERENT if found.differences else 0


def _prune(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint.inspection import prune

    for path in prune(own.run, own.keep_last):
        print(f"deleted {path.name}")


def _reshard(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint.folder import CheckpointFolder, find_checkpoint
    from moe_parallel.training.checkpoint.inspection import reshard
    from moe_parallel.training.run_lock import run_lock

    checkpoint = find_checkpoint(own.checkpoint)
    with run_lock(own.target):
        written = reshard(checkpoint, CheckpointFolder(own.target), own.files)
    number = len(list(written.glob("*.distcp")))
    print(f"wrote {written}, {number} files of tensors")


COMMANDS = {
    "list": _list,
    "verify": _verify,
    "show": _show,
    "diff": _diff,
    "prune": _prune,
    "reshard": _reshard,
}


def _without_flag(error: InputError) -> str:
    """The message of a run, which names --load or --save; this tool has neither."""
    return str(error).removeprefix("--load ").removeprefix("--save ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
