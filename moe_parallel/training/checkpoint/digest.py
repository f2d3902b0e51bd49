"""Digests of a model's weights and of its optimizer's state: equal states have equal digests.

The digest of a tensor is a sum modulo 2^64 over its elements. Element [i, j, ...] adds

    k * a_0(i) * a_1(j) * ... * (its bits as an integer)

where k, of the tensor's key in a checkpoint, and a_d(i), of index i of axis d, are odd
pseudo-random numbers of 64 bits. Because they are odd, one flipped bit always changes the sum. Two
tensors or elements that change places change it unless their random factors collide, with a
probability of about 2^-32 at most. This is Freivalds' test of a matrix D by u^T D v (1979), with
one vector for each axis.

A sum does not depend on order, and indices and keys are those of the whole model. So the parts of a
tensor may be summed on any ranks: the digest is the same in every layout, and that of a checkpoint
is the same as that of the run that saved it. A part that several ranks hold is counted once, on the
rank that would save it; `replicas` compares the copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.optimizer import MegatronOptimizer

from moe_parallel.training.checkpoint.model import model_tensors, placed_tensors
from moe_parallel.training.checkpoint.optimizer import (
    STATE_PREFIX,
    master_tensors,
    moment_tensors,
    pieces,
)
from moe_parallel.training.checkpoint.replicas import astray
from moe_parallel.training.checkpoint.whole import read_in_groups, tensor_entries
from moe_parallel.training.gathered import gather_weights

#: Elements whose products, of int64, are in memory at a time: they fit in a CPU's cache.
AT_ONCE = {"cpu": 2**16, "cuda": 2**24}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclass(frozen=True)
class Digest:
    """16 hexadecimal digits each.

    Attributes:
        weights: of the weights and buffers that a checkpoint contains.
        optimizer: of Adam's moments and of the fp32 copies of weights that are not fp32.
    """

    weights: str
    optimizer: str


def state_digest(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> tuple[Digest, str | None]:
    """The digest of a model and its optimizer, and the line of `astray`, if a copy differs.

    Collective; waits for the device a few times.
    """
    gather_weights(chunks)
    model = model_tensors(chunks)
    held = pieces(optimizer, model)
    weights = placed_tensors(model)
    tensors = [*weights, *moment_tensors(held).values(), *master_tensors(held).values()]
    sums_N = torch.stack([_sum_of_shard(tensor) for tensor in tensors])
    counted_N = torch.tensor([is_main_replica(t.replica_id) for t in tensors]).to(sums_N.device)
    parts = (sums_N * counted_N).split([len(weights), len(tensors) - len(weights)])
    totals = torch.stack([part.sum() for part in parts])
    dist.all_reduce(totals)
    return _digest(*totals.tolist()), astray([_name(each) for each in tensors], sums_N)


def checkpoint_digest(checkpoint: Path) -> Digest:
    """The digest of the state in a checkpoint, on this process alone.

    Every tensor is read, a group at a time. Raises StorageError if a file cannot be read.
    """
    weights = optimizer = 0
    entries = tensor_entries(checkpoint)
    for (group,) in read_in_groups(entries, entries, checkpoint):
        for key, values in group.items():
            amount = int(tensor_sum(key, values, (0,) * values.dim()))
            if key.startswith(STATE_PREFIX):
                optimizer += amount
            else:
                weights += amount
    return _digest(weights, optimizer)


def tensor_sum(key: str, values: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """The sum of the module's docstring for a part of a tensor; int64 [], on its device.

    Args:
        key: of the tensor in a checkpoint.
        values: a part of it, of any dtype whose elements have 1, 2, 4 or 8 bytes.
        offsets: the index in the whole tensor of the first element of `values`, for each axis.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if values.numel() == 0:
        return total
    if values.dim() == 0:
        values, offsets = values[None], (0,)
    # Elements of 8 bytes count as two of 4: a product with their highest bit would be the same for
    # every odd factor.
    bits = values.detach().contiguous().view(_BITS[values.element_size()])
    words = bits.shape[-1] // values.shape[-1]
    offsets = (*offsets[:-1], offsets[-1] * words)
    *outer, factors = (
        odd_numbers(axis, first, size, values.device)
        for axis, (first, size) in enumerate(zip(offsets, bits.shape, strict=True))
    )
    # Only the last axis is multiplied element by element, the others row by row.
    row_factors = torch.ones(1, dtype=torch.int64, device=values.device)
    for of_axis in outer:
        row_factors = (row_factors[:, None] * of_axis).flatten()
    at_once = max(1, AT_ONCE[values.device.type] // len(factors))
    rows = bits.flatten(0, -2) if outer else bits[None]
    for some, their_factors in zip(rows.split(at_once), row_factors.split(at_once), strict=True):
        total += ((some * factors).sum(1) * their_factors).sum()
    return total * _of_key(key)


def odd_numbers(axis: int, first: int, size: int, device: torch.device) -> torch.Tensor:
    """The factors of the indices from `first` on of an axis: int64 [size], odd.

    They are numbers of the generator SplitMix64 (Steele, Lea and Flood 2014, doi
    10.1145/2660193.2660195): element i is a function of axis and i alone.
    """
    step, start = _signed(0x9E3779B97F4A7C15), _of_key(f"axis {axis}")
    x = torch.arange(first + 1, first + size + 1, device=device) * step + start
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def _sum_of_shard(tensor: ShardedTensor) -> torch.Tensor:
    values = tensor.data[(None,) * tensor.prepend_axis_num]
    return tensor_sum(tensor.key, values, tensor.global_offset)


def _name(tensor: ShardedTensor) -> str:
    """The key, and the part of the tensor unless it is the whole: `w[0:4, 8:16]`."""
    shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    if shape == tuple(tensor.global_shape):
        return str(tensor.key)
    places = zip(tensor.global_offset, shape, strict=True)
    return f"{tensor.key}[{', '.join(f'{first}:{first + size}' for first, size in places)}]"


def _digest(weights: int, optimizer: int) -> Digest:
    return Digest(*(f"{number % 2**64:016x}" for number in (weights, optimizer)))


def _of_key(text: str) -> int:
    """An odd number of a text, in the range of int64."""
    return _signed(
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") | 1
    )


def _signed(number: int) -> int:
    """The number of int64 with the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """x >> places without copies of the sign, which torch's shift of int64 makes."""
    return (x >> places) & (2 ** (64 - places) - 1)
