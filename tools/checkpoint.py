"""Verify, show, compare and rewrite the checkpoints of a run.

    python tools/checkpoint.py verify runs/my
    python tools/checkpoint.py show runs/my/iter_0000200 --tensors
    python tools/checkpoint.py diff runs/my/iter_0000200 runs/other/iter_0000200
    python tools/checkpoint.py reshard runs/my/iter_0000200 runs/moved --files 64
    python tools/checkpoint.py place runs/my runs/placed --trace runs/my/trace \\
        --expert-model-parallel-size 8

A checkpoint needs no conversion for another layout: --load reads it in any. `reshard` only changes
the number of files and the sizes of the parts that a rank reads. `place` changes the order of the
experts, so that those that tokens choose together share a rank (docs/imbalance.md). Exit codes: 0
done; 1 `diff` found differences; 2 a wrong flag, or `verify` found a damaged checkpoint.
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
        ("verify", ["run"], "read every file of every checkpoint and compare checksums"),
        ("show", ["checkpoint"], "what a checkpoint holds"),
        ("diff", ["one", "other"], "the tensors that differ, to the bit"),
        ("reshard", ["checkpoint", "target"], "write a checkpoint anew in other files"),
        ("place", ["checkpoint", "target"], "put experts that are chosen together on one rank"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        for path in paths:
            meaning = MEANINGS.get(path, "checkpoint, or run folder for its latest")
            command.add_argument(path, type=Path, metavar=path.upper(), help=meaning)
        if name == "show":
            command.add_argument("--tensors", action="store_true", help="list the tensors too")
        if name == "reshard":
            command.add_argument("--files", type=int, required=True, metavar="N",
                help="maximum number of files, and of parts of a tensor, such as the "
                "number of ranks that will load it. Weights and optimizer state stay the same to "
                "the bit; the random states and FP8 scales of the ranks are left out")  # fmt: skip
        if name == "place":
            command.add_argument(
                "--trace",
                type=Path,
                required=True,
                metavar="FOLDER",
                help="choices of the model, as --moe-router-trace of a run records them",
            )
            command.add_argument(
                "--expert-model-parallel-size",
                type=int,
                required=True,
                metavar="N",
                help="number of ranks that the experts will be divided over",
            )
    return tool.run(arguments, _run)


def _run(own: argparse.Namespace) -> int | None:
    if own.command == "reshard":
        check_positive(own, "files")
    load_torch()
    from moe_parallel.collective_errors import StorageError

    command = {
        "verify": _verify,
        "show": _show,
        "diff": _diff,
        "reshard": _reshard,
        "place": _place,
    }[own.command]
    try:
        return command(own)
    except InputError as error:
        raise InputError(_without_flag(error)) from error
    except StorageError as error:
        raise InputError(f"{error}; `verify` names damaged checkpoints") from error


def _verify(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint.folder import RECORD, CheckpointFolder
    from moe_parallel.training.checkpoint.record import check_content, read_record

    if (own.run / RECORD).exists():
        raise InputError(f"{own.run} is one checkpoint: name the folder of its run")
    paths = CheckpointFolder(own.run).paths()
    if not paths:
        raise InputError(f"{own.run}: there is no checkpoint; name the folder given to --save")
    damaged = 0
    for path in paths:
        try:
            files = read_record(path)["files"]
            check_content(path, files, slice(None))
        except InputError as error:
            damaged += 1
            reason = _without_flag(error).removeprefix(f"{path}: ")
            print(f"{path.name}  {reason}", flush=True)
        else:
            print(f"{path.name}  whole: {len(files)} files, {_size(files)}", flush=True)
    if damaged:
        raise InputError(f"{own.run}: {damaged} of {len(paths)} checkpoints are damaged")


def _show(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint.folder import find_checkpoint
    from moe_parallel.training.checkpoint.index import stored_shapes
    from moe_parallel.training.checkpoint.record import read_record

    checkpoint = find_checkpoint(own.checkpoint)
    record, tensors = read_record(checkpoint), stored_shapes(checkpoint)
    counts = ("iteration", "consumed_samples", "consumed_tokens")
    facts = {
        "checkpoint": checkpoint,
        **{name.replace("_", " "): f"{record['training'][name]:,}" for name in counts},
        "layout": " ".join(f"{name} {size}" for name, size in record["layout"].items()) or "none",
        "optimizer state": "no, weights only" if record["adam_step"] is None else "yes",
        "versions": ", ".join(f"{name} {v}" for name, v in record.get("versions", {}).items()),
        "tensors": len(tensors),
        "size": _size(record["files"]),
    }
    for name, value in facts.items():
        print(f"{name:<18}{value}")
    if own.tensors:
        for key, shape in sorted(tensors.items()):
            print(f"  {key}  {list(shape)}")


def _diff(own: argparse.Namespace) -> int:
    from moe_parallel.training.checkpoint.folder import find_checkpoint
    from moe_parallel.training.checkpoint.inspection import compare

    equal, differences = compare(find_checkpoint(own.one), find_checkpoint(own.other))
    for key, how in list(differences.items())[:SHOWN]:
        print(f"{key}: {how}")
    if len(differences) > SHOWN:
        print(f"... and {len(differences) - SHOWN} more")
    print(f"{equal} tensors are equal, {len(differences)} differ")
    return DIFFERENT if differences else 0


def _reshard(own: argparse.Namespace) -> None:
    from moe_parallel.training.checkpoint.folder import CheckpointFolder, find_checkpoint
    from moe_parallel.training.checkpoint.inspection import rewrite
    from moe_parallel.training.run_lock import run_lock

    checkpoint = find_checkpoint(own.checkpoint)
    with run_lock(own.target):
        written = rewrite(checkpoint, CheckpointFolder(own.target), own.files)
    number = len(list(written.glob("*.distcp")))
    print(f"wrote {written}, {number} files of tensors")


def _place(own: argparse.Namespace) -> None:
    from moe_parallel.telemetry.router_trace import read_trace
    from moe_parallel.training.checkpoint.folder import CheckpointFolder, find_checkpoint
    from moe_parallel.training.checkpoint.placement import fit, place
    from moe_parallel.training.run_lock import run_lock
    from moe_parallel.training.standalone import standalone_config

    checkpoint = find_checkpoint(own.checkpoint)
    config = standalone_config([], load=str(checkpoint))
    placement = fit(config, read_trace(own.trace, "--trace"), own.expert_model_parallel_size)
    print(f"{'layer':>5}{'rows a token':>15}{'placed':>9}{'max/mean':>11}{'placed':>9}")
    for layer in placement.layers:
        print(
            f"{layer.number:>5}{layer.before.rows:>15.3f}{layer.after.rows:>9.3f}"
            f"{layer.before.imbalance:>11.3f}{layer.after.imbalance:>9.3f}"
        )
    fitted, measured = (f"{s[0]} to {s[-1]}" for s in (placement.fitted, placement.measured))
    print(f"fitted to the steps {fitted}, measured on {measured}")
    with run_lock(own.target):
        written = place(checkpoint, CheckpointFolder(own.target), placement)
    print(f"wrote {written}")


def _size(files: dict[str, dict[str, int]]) -> str:
    amount = sum(file["bytes"] for file in files.values())
    return f"{amount / 2**20:,.1f} MiB" if amount < 2**30 else f"{amount / 2**30:,.1f} GiB"


def _without_flag(error: InputError) -> str:
    """The message of a run, which names --load or --save; this tool has neither."""
    return str(error).removeprefix("--load ").removeprefix("--save ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
