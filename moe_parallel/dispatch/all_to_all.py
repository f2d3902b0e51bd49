"""Dispatch over expert-parallel and expert-tensor-parallel ranks, by all-to-all in each direction.

The group holds every expert exactly once. Rank (e, t) holds shard t of the matrices of the experts
e L .. (e+1) L - 1, and t varies fastest. A token's row is sent to all shards of its expert: to the
row map each shard is an expert of its own, so the choice of an expert is one choice of each of its
shards. Each shard computes a partial result, and the token's own rank sums the results of all
choices and shards at once.

A row is one message: the token, the prob of the choice and, if it is sent, C (ops/packed_rows.py).
Received rows are in the order of the sending ranks. The experts find their rows with a row map, and
nothing is sorted in memory.

Shape suffixes: R ranks of the group (in `sent_R`, `*_RL`) or the low-rank size (in `c_*R`), L
experts on this rank, T tokens of this rank, K choices of each, J = K S choices of shards, E all
experts, S shards of each, N rows sent, M rows received, W elements of a packed row; others as in
`dispatched`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_parallel.dispatch.dispatched import Dispatched
from moe_parallel.ops import Ops, RowMap
from moe_parallel.ops.packed_rows import unpack_rows
from moe_parallel.selection.choices import Choices
from moe_parallel.telemetry.progress import Phase, Progress


@dataclass(frozen=True)
class AllToAllRoute:
    """The route of the rows, which `combine` needs to return the outputs."""

    row_map: RowMap  # the rows of this rank's own tokens, as they are sent
    sent_R: list[int]  # rows sent to each rank
    received_R: list[int]  # rows received from each rank


@dataclass(frozen=True)
class PackedSizes:
    """The elements of a token, and of its C, in a packed row."""

    width: int
    rank: int  # 0: C is not sent

    @classmethod
    def of(cls, x_TD: torch.Tensor, choices: Choices) -> PackedSizes:
        return cls(x_TD.shape[1], 0 if choices.c_TKR is None else choices.c_TKR.shape[2])


class AllToAllDispatcher:
    """Sends rows to experts that are spread over `group`, each split into `expert_shards`."""

    # The gradient of the softmax over the norms needs the gradients of all probs of a token, which
    # arise on several ranks.
    takes_norms = False

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        expert_shards: int,
        ops: Ops,
        takes_c: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            num_experts: E, over all ranks.
            group: the ranks that together hold every expert once; shards vary fastest.
            expert_shards: the number of ranks that share the matrices of one expert (etp).
            ops: the operators.
            takes_c: send C = x W_down with each row. It pays if the link is faster than computing
                C again.
            progress: told when this rank exchanges rows, forward and backward; None: nobody is.
        """
        assert group.size() % expert_shards == 0, (group.size(), expert_shards)
        self.num_experts = num_experts
        self.group = group
        self.expert_shards = expert_shards
        self.ops = ops
        self.takes_c = takes_c
        self.progress = progress or Progress()
        self.parts = 1  # into which the experts of a rank are divided; see in_parts

    def dispatch(
        self, x_TD: torch.Tensor, choices: Choices, pad_rows_per_expert: int | None
    ) -> Dispatched[AllToAllRoute]:
        row_map = self._row_map(choices, pad_rows_per_expert)
        sent_RL = row_map.counts_E.view(-1, self._experts_per_rank)
        received_RL = torch.empty_like(sent_RL)
        with self.progress.during(Phase.DISPATCH):
            dist.all_to_all_single(received_RL, sent_RL, group=self.group)
            both_2R = torch.stack([sent_RL.sum(1), received_RL.sum(1)])
            sent_R, received_R = self.ops.read_sizes(both_2R, len(row_map.slots_N))
        route = AllToAllRoute(row_map, sent_R, received_R)

        packed_NW = self._pack(x_TD, choices, row_map)
        packed_MW = self._exchange(packed_NW, received_R, sent_R)
        wire_bytes = self._wire_bytes(route, row_bytes(packed_NW), row_bytes(x_TD))
        sizes = PackedSizes.of(x_TD, choices)
        return self._arrived(packed_MW, sizes, received_RL, route, wire_bytes)

    def combine(self, y_MD: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        y_ND = self._exchange(y_MD, route.sent_R, route.received_R)
        return self.ops.unpermute(y_ND, route.row_map)

    @property
    def _experts_per_rank(self) -> int:
        return self.num_experts * self.expert_shards // self.group.size()

    def _row_map(self, choices: Choices, pad_rows_per_expert: int | None) -> RowMap:
        """The rows of this rank's tokens, in the order in which they are sent."""
        experts_TJ = choices.experts_TK
        if self.expert_shards > 1 or self.parts > 1:
            numbers_ES = self._numbers_of_shards(experts_TJ.device)
            numbers_ES = F.pad(numbers_ES, (0, 0, 0, 1), value=-1)  # -1 is the last entry
            experts_TJ = numbers_ES[experts_TJ].flatten(1)
        count = self.num_experts * self.expert_shards
        return self.ops.routing_map(experts_TJ, count, pad_rows_per_expert, choices.all_chosen)

    def _numbers_of_shards(self, device: torch.device) -> torch.Tensor:
        """The shards of each expert, numbered by part, by rank, then by expert: [E, shards]."""
        of_part = self._experts_per_rank // self.parts
        sizes = (self.parts, -1, self.expert_shards, of_part)
        numbers = torch.arange(self.num_experts * self.expert_shards, device=device).view(sizes)
        return numbers.permute(1, 0, 3, 2).reshape(self.num_experts, self.expert_shards)

    def _pack(self, x_TD: torch.Tensor, choices: Choices, row_map: RowMap) -> torch.Tensor:
        """The rows of `row_map` as they are sent."""
        probs_TJ, c_TJR = choices.probs_TK, choices.c_TKR
        if self.expert_shards > 1:
            probs_TJ = probs_TJ.repeat_interleave(self.expert_shards, dim=1)
        if self.expert_shards > 1 and c_TJR is not None:
            c_TJR = c_TJR.repeat_interleave(self.expert_shards, dim=1)
        return self.ops.pack_rows(x_TD, probs_TJ, row_map, c_TJR)

    def _arrived(
        self,
        packed_MW: torch.Tensor,
        sizes: PackedSizes,
        received_RL: torch.Tensor,
        route: AllToAllRoute,
        wire_bytes: int,
    ) -> Dispatched[AllToAllRoute]:
        """What the experts here compute with."""
        x_MD, probs_M, c_MR = unpack_rows(packed_MW, sizes.width, sizes.rank)
        row_map = self._row_map_of_arrivals(received_RL, len(x_MD))
        c_MJR = None if c_MR is None else c_MR.unsqueeze(1)
        return Dispatched(x_MD, probs_M.unsqueeze(1), row_map, c_MJR, route, wire_bytes)

    def _row_map_of_arrivals(self, received_RL: torch.Tensor, rows: int) -> RowMap:
        """The row map of the local experts. Received rows are sorted by sender, then by expert."""
        num_local = received_RL.size(1)
        experts_X = torch.arange(received_RL.numel(), device=received_RL.device) % num_local
        experts_M = experts_X.repeat_interleave(received_RL.flatten(), output_size=rows)
        return self.ops.routing_map(experts_M.unsqueeze(1), num_local, all_chosen=True)

    def _exchange(
        self, rows: torch.Tensor, received_R: list[int], sent_R: list[int]
    ) -> torch.Tensor:
        from megatron.core.tensor_parallel.mappings import all_to_all

        with self.progress.during(Phase.DISPATCH):
            received = all_to_all(self.group, rows, received_R, sent_R)
        self.progress.during_backward(Phase.DISPATCH, received)
        return received

    def _wire_bytes(self, route: AllToAllRoute, there: int, back: int) -> int:
        """The bytes that this rank sends to others: `there` per row and `back` per output."""
        here = self.group.rank()
        sent = sum(route.sent_R) - route.sent_R[here]
        received = sum(route.received_R) - route.received_R[here]
        return sent * there + received * back


def row_bytes(rows: torch.Tensor) -> int:
    """The bytes of one row."""
    return rows.shape[1:].numel() * rows.element_size()
