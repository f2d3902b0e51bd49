"""The parts of parameters on a rank, by their names in Megatron-Core's checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory


def shards(model: Any) -> list[ShardedTensor]:
    """The parameters of a Megatron module as shards of those of the complete model.

    The data of a shard is the parameter itself, or a view of it. A fused gate and up projection
    consists of two shards of one tensor. Buffers are left out.
    """
    buffers = {id(buffer) for buffer in model.buffers()}
    entries: list[Any] = []
    for entry in model.sharded_state_dict().values():
        parts = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        entries += parts if isinstance(parts, list) else [parts]
    return [
        entry
        for entry in entries
        if isinstance(entry, ShardedTensor) and id(entry.data) not in buffers
    ]


def total_parameters(chunks: list[Any]) -> int:
    """The number of parameters of the complete model, each counted once. Collective.

    Args:
        chunks: this rank's model chunks, without wrappers.
    """
    sizes = {
        shard.key: math.prod(shard.global_shape) for chunk in chunks for shard in shards(chunk)
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sizes)
    return sum({key: size for each in everywhere for key, size in each.items()}.values())
