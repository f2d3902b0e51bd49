"""Print how many parameters the model of a configuration has, as one JSON object.

    python tools/count_parameters.py --config examples/papers/aoe/aoe_732m.yaml [--flag value ...]

total           all of them
active          what a token meets: the experts that compute it, and everything that is no expert's
active_compute  the same and, for AoE, the down-projections of the other experts, which compute too

Merged experts count as the one that they become. Where training decides how many experts compute a
token (top-p), the last two are null, unless --experts-per-token says how many did.

The model is built as it would be trained, but without storage: no memory, no GPU, seconds.
Takes every flag of pretrain_gpt_moe.py besides its own.
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
    selection_name,
    validate,
)
from moe_parallel.config.one_line_parser import OneLineParser
from moe_parallel.errors import InputError


def main(arguments: list[str]) -> int:
    try:
        own, flags = _parser().parse_known_args(arguments)
        config = parse_command_line(flags)
        # The layout does not change the model: count it on one rank.
        config = dataclasses.replace(config, parallel=ParallelConfig())
        validate(config, world_size=1)
        if config.data.vocab_size is None:
            raise InputError("--vocab-size is not set: give the size of the tokenizer")
        if own.experts_per_token is not None:
            _check_experts_per_token(config, own.experts_per_token)
        print(json.dumps(_count(config, config.data.vocab_size, own.experts_per_token)))
    except InputError as error:
        print(f"count_parameters.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="count_parameters.py",
        usage="python tools/count_parameters.py --config FILE.yaml [--flag value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--experts-per-token",
        metavar="X",
        type=float,
        help="experts that compute a token on average, where training decides it: what a run logs",
    )
    return parser


def _check_experts_per_token(config: Config, experts: float) -> None:
    if config.moe.num_experts is None:
        raise InputError(f"--experts-per-token is {experts}, but the model is dense: leave it out")
    if config.selection.mean_choices is not None:
        raise InputError(
            f"--experts-per-token is {experts}, but --expert-selection "
            f"{selection_name(config.selection)} itself says that it is "
            f"{config.selection.mean_choices}: leave it out"
        )
    if not 1 <= experts <= config.moe.num_experts:
        raise InputError(
            f"--experts-per-token is {experts}: it must be from 1 to --num-experts "
            f"{config.moe.num_experts}"
        )


def _count(
    config: Config, vocab_size: int, experts_per_token: float | None
) -> dict[str, int | None]:
    # Here, so that --help and wrong flags are answered before torch is loaded.
    import torch
    from torch import distributed as dist

    from moe_parallel.platform.notices import hush_notices

    hush_notices()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moe_parallel.model.parameters import count_parameters
    from moe_parallel.parallel import destroy_groups, initialize_groups
    from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu

    if not torch.cuda.is_available():
        adapt_megatron_to_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = initialize_groups(config.parallel)
        model_parallel_cuda_manual_seed(config.training.seed)
        return dataclasses.asdict(count_parameters(config, vocab_size, groups, experts_per_token))
    finally:
        destroy_groups()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
