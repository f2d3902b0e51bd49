"""Initial weights that do not depend on the parallel layout."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from moe_parallel.model.shards import shards

#: W_o of routed, merged and shared experts.
_OUTPUT = re.compile(r"(^|\.)(w_out_\w+|linear_fc2\.weight)$")


@torch.no_grad()
def initialize_weights(
    model: Any, seed: int | str, std: float, output_std: float | None = None
) -> None:
    """Fill every parameter of `model` (a Megatron module).

    Norms start at 1, biases at 0, matrices with N(0, std^2), or with `output_std` those of experts
    whose products are added to the residual stream.

    A parameter with an attribute `init_std` that is not None has that standard deviation instead; a
    vector with 0 is a bias.

    The sharded state dict names each parameter in the complete model and gives this rank's part of
    it. A complete matrix is drawn from a generator seeded by its name, and the part is copied.
    Weights stacked over experts are drawn per expert, so that no rank draws those of other ranks.
    """
    for shard in shards(model):
        own_std = getattr(shard.data, "init_std", None)
        usual = output_std if output_std is not None and _OUTPUT.search(shard.key) else std
        scale = usual if own_std is None else own_std
        if len(shard.global_shape) == 1:
            shard.data.fill_(0.0 if shard.key.endswith(".bias") or own_std == 0 else 1.0)
        elif len(shard.global_shape) == 2:
            shard.data.copy_(_part(shard, _normal(shard, seed, shard.key), 0) * scale)
        else:
            for expert, weight in enumerate(shard.data, start=shard.global_offset[0]):
                weight.copy_(_part(shard, _normal(shard, seed, f"{shard.key}.{expert}"), 1) * scale)


def _normal(shard: ShardedTensor, seed: int | str, name: str) -> torch.Tensor:
    """A standard normal matrix of the last axes of the complete tensor, from seed and name."""
    shape = shard.global_shape if len(shard.global_shape) == 2 else shard.global_shape[1:]
    device = shard.data.device
    return torch.randn(shape, generator=named_generator(f"{seed} {name}", device), device=device)


def named_generator(name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by a name: the same on every rank that passes this name."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _part(shard: ShardedTensor, whole: torch.Tensor, first_axis: int) -> torch.Tensor:
    """This rank's part of `whole`, which has the axes of the tensor from `first_axis` on."""
    offsets, sizes = shard.global_offset[first_axis:], shard.local_shape[first_axis:]
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(axis, offset, size)
    return whole
