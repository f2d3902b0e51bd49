"""Predict what a configuration needs on a cluster: memory, messages, time, and the best layouts.

    python tools/plan.py --config FILE.yaml --cluster h100x8:64 [--flag value ...]

h100x8:64 is 64 nodes of 8 H100, 512 GPUs. Known nodes: a100x8, h100x8, h200x8, b200x8.

Without --own-layout, the tool tries every layout and micro-batch size, lists the fastest that fit
into memory, and says why the others do not fit. --json prints everything as one JSON object.

The tool builds the layers of the model without storage and counts what they hold, keep, compute and
send; times are a roofline (docs/scaling.md). Besides its own flags, it accepts those of
pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from moe_parallel.config import parse_command_line
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import RESERVE, Cluster, measured, parse_cluster
from moe_parallel.platform.megatron import suppress_warnings
from moe_parallel.tool import Tool, check_positive

GIB = 2**30


def main(arguments: list[str]) -> int:
    usage = "python tools/plan.py --config FILE.yaml --cluster NODE:NUMBER [--flag value ...]"
    tool = Tool(__file__, __doc__, usage=usage)
    tool.add_argument("--cluster", metavar="NODE:NUMBER", help="kind and number of nodes")
    tool.add_argument(
        "--own-layout",
        action="store_true",
        help="plan only the layout and the micro-batch of the configuration",
    )
    tool.add_argument(
        "--top", metavar="N", type=int, default=10, help="number of layouts to list (default: 10)"
    )
    tool.add_argument(
        "--reserve-gib",
        metavar="X",
        type=float,
        default=RESERVE / GIB,
        help=f"memory of a GPU that a plan leaves free, in GiB (default: {RESERVE // GIB})",
    )
    tool.add_argument(
        "--mean-choices",
        metavar="X",
        type=float,
        help="mean number of experts per token, as measured in a run: for top_p and "
        "aoe_top_p, and in place of the target of a system that has one",
    )
    tool.add_argument(
        "--measured",
        metavar="FILE",
        help="JSON with measured shares of the peaks and seconds of a call and of a kernel, by the "
        "names in docs/scaling.md; they replace the published ones",
    )
    tool.add_argument("--json", action="store_true", help="print one JSON object")
    return tool.run_with_training_flags(arguments, _plan)


def _plan(own: argparse.Namespace, flags: list[str]) -> None:
    _check(own)
    cluster = _cluster(own)
    suppress_warnings()  # of Megatron-Core, before it is imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed
    from moe_parallel.plan.listing import Listing, listing_json, listing_table

    listing = Listing.of(
        parse_command_line(flags),
        cluster,
        reserve=round(own.reserve_gib * GIB),
        mean_choices=own.mean_choices,
        own_layout=own.own_layout,
        most=own.top,
    )
    print(f"{json.dumps(listing_json(listing))}\n" if own.json else listing_table(listing), end="")


def _check(own: argparse.Namespace) -> None:
    if own.cluster is None:
        raise InputError("--cluster is not set: give nodes and their number, as in h100x8:64")
    check_positive(own, "top")
    if not 0 <= own.reserve_gib < 1000:
        raise InputError(f"--reserve-gib is {own.reserve_gib}: it must be from 0 to below 1000")


def _cluster(own: argparse.Namespace) -> Cluster:
    """The cluster of --cluster, with the shares and seconds of --measured."""
    cluster = parse_cluster(own.cluster)
    return cluster if own.measured is None else measured(Path(own.measured), cluster)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
