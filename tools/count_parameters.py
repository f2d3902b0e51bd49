"""Print how many parameters the model of a configuration has, as one JSON object.

    python tools/count_parameters.py --config examples/aoe_732m.yaml [--flag value ...]

total           all of them
active          what a token meets: the experts that it chooses, and everything that is no expert's
active_compute  the same and, for AoE, the down-projections of the other experts, which compute too

The model is built as it would be trained, but without storage: no memory, no GPU, seconds.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from moe_parallel.config import Config, ParallelConfig, parse_command_line, validate
from moe_parallel.errors import InputError


def main(arguments: list[str]) -> int:
    try:
        config = parse_command_line(arguments)
        # The layout does not change the model: count it on one rank.
        config = dataclasses.replace(config, parallel=ParallelConfig())
        validate(config, world_size=1)
        if config.data.vocab_size is None:
            raise InputError("--vocab-size is not set: give the size of the tokenizer")
        print(json.dumps(_count(config, config.data.vocab_size)))
    except InputError as error:
        print(f"count_parameters.py: {error}", file=sys.stderr)
        return 2
    return 0


def _count(config: Config, vocab_size: int) -> dict[str, int]:
    # Here, so that --help and wrong flags are answered before torch is loaded.
    import torch
    from torch import distributed as dist

    from moe_parallel.platform.notices import hush_notices

    hush_notices()

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moe_parallel.model.parameters import count_parameters
    from moe_parallel.parallel import initialize_groups
    from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu

    if not torch.cuda.is_available():
        adapt_megatron_to_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = initialize_groups(config.parallel)
        model_parallel_cuda_manual_seed(config.training.seed)
        return dataclasses.asdict(count_parameters(config, vocab_size, groups))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
