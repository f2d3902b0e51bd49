r"""Convert a trained model to another system of expert selection, to continue training from there.

    python tools/convert.py --to aoe --load runs/moe --save runs/aoe-start \
        --aoe-low-rank-size 32 --train-iters 300 --lr 1e-3
    python pretrain_gpt_moe.py --nproc-per-node 2 --config runs/aoe-start/config.yaml \
        --load runs/aoe-start --save runs/healed

aoe    from topk: W_g is factorized, and norms are fitted to rank the experts as the router did
topk   from lory and lory_prefix: weights are copied, and the router now routes single tokens;
       also from topk: a new start with another schedule, for comparison

The tool runs on one process, in fp32, whatever layout and precision trained the model. Besides its
own flags, it accepts those of pretrain_gpt_moe.py. They change the new configuration, which is
otherwise the model's. The new run starts at iteration 0 with fresh optimizer state and the schedule
given here. The tool prints a table and writes the same data to conversion.json next to the
checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, load_torch


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--to", metavar="aoe|topk", help="the new system")
    tool.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    tool.add_argument("--save", metavar="RUN", help="new run folder")
    tool.add_argument(
        "--calibration-samples",
        type=int,
        default=128,
        help="to aoe: number of training sequences to fit to; a third as many are held out for "
        "measurements (default: 128)",
    )
    return tool.run_with_training_flags(arguments, _convert)


def _check(own: argparse.Namespace) -> None:
    if own.to not in ("aoe", "topk"):
        raise InputError(f"--to is {own.to}: it takes one of aoe, topk")
    check_load(own)
    if own.save is None:
        raise InputError("--save is not set: name a new folder")


def _convert(own: argparse.Namespace, flags: list[str]) -> None:
    _check(own)
    load_torch()

    from moe_parallel.config import parse_command_line
    from moe_parallel.convert.configuration import converted_config, left_out
    from moe_parallel.convert.conversion import conversion_json, conversion_table, convert
    from moe_parallel.data.atomic_files import write_atomically
    from moe_parallel.systems import AoESelection
    from moe_parallel.training.checkpoint.folder import find_checkpoint
    from moe_parallel.training.run_lock import locked_folder
    from moe_parallel.training.standalone import single_process, standalone_config

    checkpoint = find_checkpoint(Path(own.load))
    source = standalone_config([], load=str(checkpoint))
    trained = parse_command_line(["--config", str(checkpoint / "config.yaml")])
    target = converted_config(trained, own.to, own.save, flags)
    selection = target.selection
    rank = selection.aoe_low_rank_size if isinstance(selection, AoESelection) else None
    for option in left_out(trained, own.to):
        print(f"{option}: left out, {own.to} has no such option")
    with single_process(source) as groups, locked_folder(own.save):
        done = convert(source, target, groups, rank, own.calibration_samples, print)
    print(conversion_table(done, source.selection.choices_per_token, source.moe.num_experts))
    facts = {"from": str(checkpoint), "to": own.to, "options": vars(own), "flags": flags}
    write_atomically(Path(own.save) / "conversion.json", conversion_json(done, **facts))
    print(f"saved {done.checkpoint}")
    print(f"train on: --config {own.save}/config.yaml --load {own.save} --save ANOTHER")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
