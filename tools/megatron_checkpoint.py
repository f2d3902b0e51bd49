r"""Import a checkpoint of Megatron-LM as a run folder, or write a run as one that it loads.

    python tools/megatron_checkpoint.py import --input megatron/moe --output runs/moe \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json
    python pretrain_gpt_moe.py --nproc-per-node 8 --load runs/moe --finetune --save runs/tuned
    python tools/megatron_checkpoint.py export --load runs/tuned --output megatron/tuned
    torchrun ... pretrain_gpt.py --load megatron/tuned --use-checkpoint-args ...

The format is torch_dist, of dense and MoE models, by Megatron-Core 0.16 to 0.19. Only weights are
carried, to the bit. They are read and written one layer at a time, and nothing of a checkpoint is
run. The model is that of the checkpoint's own arguments; where it has none, as from other programs
on Megatron-Core, the flags of pretrain_gpt_moe.py give the sizes. Otherwise these flags change the
training and not the model. docs/megatron_checkpoints.md tells which models are read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, load_torch, progress


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    commands = tool.add_commands()
    command = commands.add_parser("import", help="a checkpoint of Megatron-LM to a run folder")
    command.add_argument("--input", metavar="DIR", help="its --save, or one of its checkpoints")
    command.add_argument("--output", metavar="RUN", help="new run folder")
    command = commands.add_parser("export", help="a run to a checkpoint of Megatron-LM")
    command.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    command.add_argument("--output", metavar="DIR", help="new folder for Megatron-LM's --load")
    command.add_argument(
        "--transformer-impl",
        metavar="transformer_engine|local",
        default="transformer_engine",
        help="Megatron-LM's flag, because its two specs of layers name the norm of an MoE layer "
        "differently (default: transformer_engine)",
    )
    return tool.run_with_training_flags(arguments, _run)


def _run(own: argparse.Namespace, flags: list[str]) -> None:
    source = "input" if own.command == "import" else "load"
    for name in (source, "output"):
        if getattr(own, name) is None:
            raise InputError(f"--{name} is not set: name a folder")
    COMMANDS[own.command](own, flags)


def _import(own: argparse.Namespace, flags: list[str]) -> None:
    load_torch()
    from moe_parallel.huggingface.importing import import_summary
    from moe_parallel.megatron_checkpoint.importing import (
        controlled,
        import_checkpoint,
        plan_import,
    )

    plan = plan_import(Path(own.input), flags)
    with progress("import", None, "B") as advance:
        imported = import_checkpoint(plan, Path(own.output), advance)
    for name, value in (import_summary(plan, imported) | controlled(plan)).items():
        print(f"{name}: {value}")
    for name in imported.not_finite:
        print(f"warning: {name} has a NaN or an infinity, as in --input", file=sys.stderr)
    print(f"train on: --load {own.output} --finetune --save ANOTHER --data-path ...")


def _export(own: argparse.Namespace, flags: list[str]) -> None:
    if flags:
        raise InputError(f"{flags[0]} is for `import`: the run has its own configuration")
    if own.transformer_impl not in ("transformer_engine", "local"):
        raise InputError(
            f"--transformer-impl is {own.transformer_impl}: use transformer_engine or local"
        )
    load_torch()
    from moe_parallel.megatron_checkpoint.export import export

    with progress("export", None, "B") as advance:
        done = export(own.load, Path(own.output), own.transformer_impl, advance)
    print(f"saved {done.checkpoint}: {done.parameters:,} parameters, {done.dtype}, weights only")
    print(f"load in Megatron-LM by: --load {own.output} --use-checkpoint-args")


COMMANDS = {"import": _import, "export": _export}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
