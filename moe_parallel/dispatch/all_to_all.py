"""Dispatch over expert-parallel and expert-tensor-parallel ranks, by all-to-all in each direction.

The group holds every expert exactly once. Rank (e, t) holds shard t of the matrices of the experts
e L .. (e+1) L - 1, and t varies fastest. A token's row is sent to all shards of its expert. Each
shard computes a partial result, and the partial results are summed on the token's own rank.
Received rows are in the order of the sending ranks. The experts find their rows with a row map, and
nothing is sorted in memory.

Shape suffixes: R ranks of the group (in `sent_R`, `*_RL`) or the low-rank size (in `c_*R`), L
experts on this rank, N rows sent, M rows received; others as in `dispatched`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all

from moe_parallel.dispatch.dispatched import Dispatched, probs_of_rows, rows_of_choices
from moe_parallel.ops import Ops, RowMap
from moe_parallel.selection.choices import Choices
from moe_parallel.telemetry.progress import Phase, Progress


@dataclass(frozen=True)
class AllToAllRoute:
    """The route of the rows, which `combine` needs to return the outputs."""

    row_map: RowMap  # the rows of this rank's own tokens, by global expert
    sent_R: list[int]  # rows sent to each rank
    received_R: list[int]  # rows received from each rank


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

    def dispatch(
        self, x_TD: torch.Tensor, choices: Choices, pad_rows_per_expert: int | None
    ) -> Dispatched[AllToAllRoute]:
        row_map = self.ops.routing_map(
            choices.experts_TK, self.num_experts, pad_rows_per_expert, choices.all_chosen
        )
        sent_RL = self._for_every_shard(row_map.counts_E.view(-1, self._experts_per_rank))
        received_RL = torch.empty_like(sent_RL)
        with self.progress.during(Phase.DISPATCH):
            dist.all_to_all_single(received_RL, sent_RL, group=self.group)
            # The host waits for the device here, and nowhere else in the layer: messages need
            # sizes.
            sent_R, received_R = torch.stack([sent_RL.sum(1), received_RL.sum(1)]).tolist()
        route = AllToAllRoute(row_map, sent_R, received_R)

        x_MD = self._to_experts(self.ops.permute(x_TD, row_map), route)
        probs_M = self._to_experts(probs_of_rows(choices.probs_TK, row_map), route)
        c_TKR, c_MR = choices.c_TKR, None
        if c_TKR is not None:
            c_NR = self.ops.permute(c_TKR.flatten(0, 1), rows_of_choices(row_map))
            c_MR = self._to_experts(c_NR, route)
        there = sum(row_bytes(rows) for rows in (x_MD, probs_M, c_MR) if rows is not None)
        return Dispatched(
            x_MD,
            probs_M.unsqueeze(1),
            self._row_map_of_arrivals(received_RL, len(x_MD)),
            None if c_MR is None else c_MR.unsqueeze(1),
            route,
            self._wire_bytes(route, there, row_bytes(x_MD)),
        )

    def combine(self, y_MD: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        return self.ops.unpermute(self._to_tokens(y_MD, route), route.row_map)

    @property
    def _experts_per_rank(self) -> int:
        return self.num_experts * self.expert_shards // self.group.size()

    def _for_every_shard(self, counts_XL: torch.Tensor) -> torch.Tensor:
        """The counts repeated for every rank that holds a shard of the expert: [R, L]."""
        return counts_XL.repeat_interleave(self.expert_shards, dim=0)

    def _row_map_of_arrivals(self, received_RL: torch.Tensor, rows: int) -> RowMap:
        """The row map of the local experts. Received rows are sorted by sender, then by expert."""
        num_local = received_RL.size(1)
        experts_X = torch.arange(received_RL.numel(), device=received_RL.device) % num_local
        experts_M = experts_X.repeat_interleave(received_RL.flatten(), output_size=rows)
        return self.ops.routing_map(experts_M.unsqueeze(1), num_local, all_chosen=True)

    def _to_experts(self, rows: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Sends rows, sorted by global expert, to the experts' ranks, and receives those sent here.

        The received rows are in the order of the sending ranks.
        """
        if self.expert_shards > 1:
            sizes_X = route.sent_R[:: self.expert_shards]
            chunks = torch.split(rows, sizes_X)
            rows = torch.cat([chunk for chunk in chunks for _ in range(self.expert_shards)])
        return self._exchange(rows, route.received_R, route.sent_R)

    def _to_tokens(self, y_MD: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Returns outputs to the ranks of their tokens, and sums those of an expert's shards."""
        partial = self._exchange(y_MD, route.sent_R, route.received_R)
        return self._sum_of_shards(partial, route)

    def _exchange(
        self, rows: torch.Tensor, received_R: list[int], sent_R: list[int]
    ) -> torch.Tensor:
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

    def _sum_of_shards(self, partial: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        """Sums the partial results of an expert's shards: rows in the order of `row_map`."""
        if self.expert_shards == 1:
            return partial
        chunks = torch.split(partial, route.sent_R)
        shards = self.expert_shards
        return torch.cat(
            [torch.stack(chunks[i : i + shards]).sum(0) for i in range(0, len(chunks), shards)]
        )


def row_bytes(rows: torch.Tensor) -> int:
    """The bytes of one row."""
    return rows.shape[1:].numel() * rows.element_size()
