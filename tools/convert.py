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
    aoe = tool.add_argument_group("to aoe")
    aoe.add_argument(
        "--calibration-samples",
        type=int,
        default=128,
        help="number of training sequences to fit to; a third as many are held out for "
        "measurements (default: 128)",
    )
    aoe.add_argument(
        "--svd",
        metavar="weighted|plain",
        default="weighted",
        help="truncate the SVD that minimizes the error of x W_g on those sequences (weighted), or "
        "of W_g itself (plain) (default: weighted)",
    )
    aoe.add_argument(
        "--ranking-columns",
        type=int,
        default=4,
        help="number of columns of W_down to fit to the router; 0: fit one scale per expert "
        "(default: 4)",
    )
    aoe.add_argument(
        "--condition",
        type=float,
        default=20.0,
        help="maximum ratio of the first column's gain to the others'; a higher value ranks "
        "better, a lower one keeps W_up smaller (default: 20)",
    )
    return tool.run_with_training_flags(arguments, _convert)


def _check(own: argparse.Namespace) -> None:
    for name, known in (("to", ("aoe", "topk")), ("svd", ("weighted", "plain"))):
        value = getattr(own, name)
        if value not in known:
            raise InputError(f"--{name} is {value}: it takes one of {', '.join(known)}")
    check_load(own)
    if own.save is None:
        raise InputError("--save is not set: name a new folder")


def _convert(own: argparse.Namespace, flags: list[str]) -> None:
    _check(own)
    load_torch()

    from moe_parallel.config import parse_command_line
    from moe_parallel.convert.configuration import converted_config, left_out
    from moe_parallel.convert.conversion import conversion_json, conversion_table, convert
    from moe_parallel.convert.gate import GateOptions
    from moe_parallel.data.atomic_files import write_atomically
    from moe_parallel.systems import AoESelection
    from moe_parallel.training.checkpoint.folder import find_checkpoint
    from moe_parallel.training.run_lock import locked_folder
    from moe_parallel.training.standalone import single_process, standalone_config

    checkpoint = find_checkpoint(Path(own.load))
    source = standalone_config([], load=str(checkpoint))
    trained = parse_command_line(["--config", str(checkpoint / "config.yaml")])
    target = converted_config(trained, own.to, own.save, flags)
    gate = None
    if isinstance(target.selection, AoESelection):
        gate = GateOptions(
            target.selection.aoe_low_rank_size,
            own.svd == "weighted",
            own.ranking_columns,
            own.condition,
        )
    for option in left_out(trained, own.to):
        print(f"{option}: left out, {own.to} has no such option")
    with single_process(source) as groups, locked_folder(own.save):
        done = convert(source, target, groups, gate, own.calibration_samples, print)
    print(conversion_table(done, source.selection.choices_per_token, source.moe.num_experts))
    facts = {"from": str(checkpoint), "to": own.to, "options": vars(own), "flags": flags}
    write_atomically(Path(own.save) / "conversion.json", conversion_json(done, **facts))
    print(f"saved {done.checkpoint}")
    print(f"train on: --config {own.save}/config.yaml --load {own.save} --save ANOTHER")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
