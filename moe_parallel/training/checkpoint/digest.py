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
rank that would save it; `astray` compares the copies.

The ranks of a data-parallel group hold the same weights, and tensor-parallel ranks the same norms
and routers. Nothing in a step compares them: a rank with a broken GPU or a lost message trains on,
and only the copy on one rank is saved.
"""

from __future__ import annotations

import hashlib
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.optimizer import MegatronOptimizer

from moe_parallel.collective_errors import exchange
from moe_parallel.parallel import all_gather_single
from moe_parallel.training.checkpoint.optimizer import (
    STATE_PREFIX,
    master_tensors,
    moment_tensors,
    pieces,
)
from moe_parallel.training.checkpoint.state import model_tensors
from moe_parallel.training.checkpoint.tensors import sharded_tensors, whole_tensors
from moe_parallel.training.optimizer import gather_weights

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
    weights = sharded_tensors(model)
    tensors = [*weights, *moment_tensors(held), *master_tensors(held)]
    sums_N = torch.stack([_sum_of_shard(tensor) for tensor in tensors])
    counted_N = torch.tensor([is_main_replica(t.replica_id) for t in tensors]).to(sums_N.device)
    parts = (sums_N * counted_N).split([len(weights), len(tensors) - len(weights)])
    totals = torch.stack([part.sum() for part in parts])
    dist.all_reduce(totals)
    return _digest(*totals.tolist()), astray([_name(each) for each in tensors], sums_N)


def checkpoint_digest(checkpoint: Path) -> Digest:
    """The digest of the state in a checkpoint, on this process alone.

    Every tensor is read, one at a time. Raises StorageError if a file cannot be read.
    """
    weights = optimizer = 0
    for key, values in whole_tensors(checkpoint):
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


def astray(names: Sequence[str], sums_N: torch.Tensor) -> str | None:
    """A line that names the rank whose copies differ; None if all copies are equal. Collective.

    If most copies of a tensor are equal, the others went astray; of two, the one on the higher
    rank is named. Of several ranks, the one with the most such tensors is named.

    Args:
        names: of this rank's N tensors, each different. Ranks that hold copies use the same name.
        sums_N: a checksum of each tensor, int64, on the device of the process group.
    """
    ids, sums = _gathered(names, sums_N)
    found = _astray(ids, sums)
    if not found:
        return None
    # All ranks found the same. Only those that hold a tensor know its name.
    here = dict(zip(_ids(names), names, strict=True))
    wrong = Counter(rank for ranks in found.values() for rank in ranks)
    rank = max(wrong, key=lambda each: (wrong[each], -each))
    its_own = [each for each, ranks in found.items() if rank in ranks]
    known = exchange((socket.gethostname(), [here.get(each) for each in its_own[:1]]))
    host, (name,) = known[rank]
    right = found[its_own[0]][rank]
    more = f" and {len(its_own) - 1} more" if len(its_own) > 1 else ""
    others = f"; {len(wrong) - 1} other ranks differ too" if len(wrong) > 1 else ""
    return (
        f"rank {rank} on {host} differs from rank {right} in {name}{more}, which should be "
        f"equal{others}: go back to a checkpoint from before this, and test that host"
    )


def _gathered(names: Sequence[str], sums_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and sums of the tensors of all ranks: int64 [ranks, N of the rank with most], on the CPU.

    Rows are padded with zeros.
    """
    device = sums_N.device
    most = torch.tensor(len(names), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    mine = torch.zeros(2, int(most), dtype=torch.int64, device=device)
    mine[0, : len(names)] = torch.tensor(_ids(names), device=device)
    mine[1, : len(names)] = sums_N
    every = mine.new_empty(dist.get_world_size(), *mine.shape)
    all_gather_single(every.flatten(), mine.flatten())
    ids, sums = every.cpu().unbind(1)
    return ids, sums


def _astray(ids: torch.Tensor, sums: torch.Tensor) -> dict[int, dict[int, int]]:
    """By tensor: the ranks whose copies are wrong, each with the lowest rank that has a right one.

    Tensors are in the order of the ranks.
    """
    known, places = ids.flatten().unique(return_inverse=True)
    least = torch.full_like(known, torch.iinfo(torch.int64).max)
    most = torch.full_like(known, torch.iinfo(torch.int64).min)
    least.scatter_reduce_(0, places, sums.flatten(), "amin")
    most.scatter_reduce_(0, places, sums.flatten(), "amax")
    differs = (least != most)[places].view_as(ids)
    copies: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, place in differs.nonzero().tolist():
        copies[int(ids[rank, place])].append((rank, int(sums[rank, place])))
    found = {}
    for tensor, of_ranks in copies.items():
        counts = Counter(value for _, value in of_ranks)  # of equals, the lowest rank's is first
        right = counts.most_common(1)[0][0]
        reference = min(rank for rank, value in of_ranks if value == right)
        found[tensor] = {rank: reference for rank, value in of_ranks if value != right}
    return found


def _ids(names: Sequence[str]) -> list[int]:
    """A number of 64 bits for each name: ranks compare these instead of texts."""
    return [
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        for name in names
    ]
