"""Copies of a tensor on several ranks, and the rank whose copies differ from those of the others.

The ranks of a data-parallel group hold the same weights, and tensor-parallel ranks the same norms
and routers. Nothing in a step compares them: a rank with a broken GPU or a lost message trains on,
and only the copy on one rank is saved.
"""

from __future__ import annotations

import hashlib
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_parallel.collective_errors import exchange
from moe_parallel.parallel import all_gather_single


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
