"""Dispatch over expert-parallel and expert-tensor-parallel ranks by one all-to-all each way.

The group holds every expert exactly once: rank (e, t) has shard t of the matrices of the experts
e L .. (e+1) L - 1, t varying fastest. A token's row goes to all shards of its expert, each shard
computes a partial result, and the partial results are summed where the token lives.

Shape suffixes: R ranks of the group, L experts on this rank, others as in `dispatched`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all

from moe_parallel.dispatch.dispatched import Dispatched, gates_of_rows
from moe_parallel.ops import Ops, RowMap


@dataclass(frozen=True)
class AllToAllRoute:
    """How rows travelled: what `combine` needs to send the results back."""

    row_map: RowMap  # the rows of this rank's own tokens, by global expert
    sent_R: list[int]  # rows sent to each rank
    received_RL: list[list[int]]  # rows received from each rank for each local expert


class AllToAllDispatcher:
    """Experts are spread over the ranks of `group`, each cut into `expert_shards`."""

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, expert_shards: int, ops: Ops
    ) -> None:
        """
        Args:
            num_experts: E, over all ranks.
            group: ranks that together hold every expert once, shards varying fastest.
            expert_shards: ranks that share the matrices of one expert (etp).
            ops: the kernels.
        """
        assert group.size() % expert_shards == 0, (group.size(), expert_shards)
        self.num_experts = num_experts
        self.group = group
        self.expert_shards = expert_shards
        self.ops = ops

    def dispatch(
        self,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        gates_TK: torch.Tensor,
        rows_per_expert: int | None,
    ) -> Dispatched[AllToAllRoute]:
        row_map = self.ops.routing_map(experts_TK, self.num_experts, rows_per_expert)
        sent_RL = self._for_every_shard(row_map.counts_E.view(-1, self._experts_per_rank))
        received_RL = self._exchange_counts(sent_RL, experts_TK.device)
        route = AllToAllRoute(row_map, sent_RL.sum(1).tolist(), received_RL.tolist())
        x_ND = self._to_experts(self.ops.permute(x_TD, row_map), route)
        gates_N = self._to_experts(gates_of_rows(gates_TK, row_map), route)
        return Dispatched(x_ND, gates_N, received_RL.sum(0), route)

    def combine(self, y_ND: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        sizes_LR = [list(sizes) for sizes in zip(*route.received_RL, strict=True)]
        by_rank = _reorder_chunks(y_ND, sizes_LR)
        received_R = [sum(sizes) for sizes in route.received_RL]
        partial = all_to_all(self.group, by_rank, route.sent_R, received_R)
        return self.ops.unpermute(self._sum_of_shards(partial, route), route.row_map)

    @property
    def _experts_per_rank(self) -> int:
        return self.num_experts * self.expert_shards // self.group.size()

    def _for_every_shard(self, counts_XL: torch.Tensor) -> torch.Tensor:
        """What goes to an expert goes to every rank that holds a shard of it: [R, L]."""
        return counts_XL.repeat_interleave(self.expert_shards, dim=0)

    def _exchange_counts(self, sent_RL: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Rows that every rank sends to each expert of this rank: int64 [R, L] on the CPU."""
        sent = sent_RL.contiguous().to(device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.cpu()

    def _to_experts(self, rows: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Rows by global expert here -> rows by local expert where the experts are."""
        sizes_X = route.sent_R[:: self.expert_shards]
        copies = [chunk for chunk in torch.split(rows, sizes_X) for _ in range(self.expert_shards)]
        received_R = [sum(sizes) for sizes in route.received_RL]
        arrived = all_to_all(self.group, torch.cat(copies), received_R, route.sent_R)
        return _reorder_chunks(arrived, route.received_RL)

    def _sum_of_shards(self, partial: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Partial results by rank -> sums by global expert, in the order of `row_map`."""
        if self.expert_shards == 1:
            return partial
        chunks = torch.split(partial, route.sent_R)
        shards = self.expert_shards
        return torch.cat(
            [torch.stack(chunks[i : i + shards]).sum(0) for i in range(0, len(chunks), shards)]
        )


def _reorder_chunks(rows: torch.Tensor, sizes_AB: list[list[int]]) -> torch.Tensor:
    """Rows in chunks ordered by (a, b), of the given sizes -> the same chunks by (b, a)."""
    num_b = len(sizes_AB[0])
    chunks = torch.split(rows, [size for sizes_B in sizes_AB for size in sizes_B])
    return torch.cat([chunk for b in range(num_b) for chunk in chunks[b::num_b]])
