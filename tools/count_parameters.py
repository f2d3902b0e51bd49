"""Print how many parameters the model of a configuration has, and its FLOPs, as one JSON object.

    python tools/count_parameters.py --config examples/papers/aoe/aoe_732m.yaml [--flag value ...]

total           all parameters
active          those that a token uses: its experts, and everything outside the experts
active_compute  active and, for AoE, the down-projections of the other experts, which also compute
flops_per_token in a forward and a backward pass, by the formulas of moe_parallel/model/flops.py

Merged experts count as one expert. If training decides how many experts compute a token (top-p),
the last three are null, unless --experts-per-token gives the number.

The model is built as for training, but without storage: it needs no memory, no GPU, and seconds.
Besides its own flags, the tool accepts those of pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from moe_parallel.config import (
    Config,
    ParallelConfig,
    parse_command_line,
    validate,
)
from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, load_torch


def main(arguments: list[str]) -> int:
    usage = "python tools/count_parameters.py --config FILE.yaml [--flag value ...]"
    tool = Tool(__file__, __doc__, usage=usage)
    tool.add_argument(
        "--experts-per-token",
        metavar="X",
        type=float,
        help="mean number of experts per token, for systems where training determines it "
        "(a run logs it)",
    )
    return tool.run_with_training_flags(arguments, _print_counts)


def _print_counts(own: argparse.Namespace, flags: list[str]) -> None:
    config = parse_command_line(flags)
    # The layout does not change the model, so it is counted on one rank.
    config = dataclasses.replace(config, parallel=ParallelConfig())
    validate(config, world_size=1)
    if own.experts_per_token is not None:
        _check_experts_per_token(config, own.experts_per_token)
    load_torch()

    from moe_parallel.model.flops import token_flops
    from moe_parallel.model.parameters import count_parameters
    from moe_parallel.training.standalone import single_process, vocab_size_of

    vocab_size = vocab_size_of(config)
    with single_process(config) as groups:
        counts = count_parameters(config, vocab_size, groups, own.experts_per_token)
    chosen = own.experts_per_token or config.selection.mean_choices
    flops = None
    if counts.active is not None:
        vocabulary = config.padded_vocab_size(vocab_size)
        flops = round(token_flops(config, vocabulary, chosen or 0).training)
    print(json.dumps({**dataclasses.asdict(counts), "flops_per_token": flops}))


def _check_experts_per_token(config: Config, experts: float) -> None:
    if config.moe.num_experts is None:
        raise InputError(f"--experts-per-token is {experts}, but the model is dense: leave it out")
    if config.selection.mean_choices is not None:
        raise InputError(
            f"--experts-per-token is {experts}, but --expert-selection "
            f"{config.selection.system} fixes it at "
            f"{config.selection.mean_choices}: leave it out"
        )
    if not 1 <= experts <= config.moe.num_experts:
        raise InputError(
            f"--experts-per-token is {experts}: it must be from 1 to --num-experts "
            f"{config.moe.num_experts}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
