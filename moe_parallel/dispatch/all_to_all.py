"""Dispatch over expert-parallel and expert-tensor-parallel ranks, by all-to-all in each direction.

A token travels once to each rank that holds experts it has chosen. The rank computes them all, sums
their outputs in fp32, and returns one row; the token's own rank sums the rows of all ranks.

The group holds every expert exactly once. Rank (e, t) holds shard t of the matrices of the experts
e L .. (e+1) L - 1, and t varies fastest. A token is sent to all shards of its expert: each shard is
an expert of its own here, so the choice of an expert is one choice of each of its shards, which
computes a partial result.

A row is one message: the token, its experts there and their probs (ops/packed_rows.py). Received
rows are in the order of the sending ranks. The experts find them with a row map, as they find the
tokens of a rank that sends nothing, and nothing is sorted in memory.

Shape suffixes: D destinations (ranks, or the ranks of each part) or model width (in `x_*D`), L
experts of a destination, R ranks, T tokens of this rank, K choices of each, S shards of an expert,
J = K S choices of shards, E all experts, P = min(K, L) places of a row, N rows sent, M rows
received, W elements of a packed row, C = 2 counts: rows, and choices in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_parallel.dispatch.dispatched import Dispatched, RowBudget
from moe_parallel.ops import Ops, RowMap
from moe_parallel.ops.packed_rows import places_of, unpack_rows
from moe_parallel.selection.choices import Choices
from moe_parallel.telemetry.progress import Phase, Progress


@dataclass(frozen=True)
class AllToAllRoute:
    """The route of the rows, which `combine` needs to return the outputs."""

    row_map: RowMap  # the rows of this rank's own tokens, as they are sent
    sent_R: list[int]  # rows sent to each rank
    received_R: list[int]  # rows received from each rank
    choices: int  # in the rows received, if the host knows


class AllToAllDispatcher:
    """Sends tokens to experts that are spread over `group`, each split into `expert_shards`."""

    # The expert's rank computes C once more. The gradient of the softmax over the norms needs the
    # gradients of all probs of a token, which arise on several ranks.
    passes_c = False

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        expert_shards: int,
        ops: Ops,
        progress: Progress | None = None,
        parts: int = 1,
    ) -> None:
        """
        Args:
            num_experts: E, over all ranks.
            group: the ranks that together hold every expert once; shards vary fastest.
            expert_shards: the number of ranks that share the matrices of one expert (etp).
            ops: the operators.
            progress: told when this rank exchanges rows, forward and backward; None: nobody is.
            parts: into which the experts of a rank are divided; see in_parts.
        """
        assert group.size() % expert_shards == 0, (group.size(), expert_shards)
        self.num_experts = num_experts
        self.group = group
        self.expert_shards = expert_shards
        self.ops = ops
        self.progress = progress or Progress()
        self.parts = parts
        self.destinations = parts * group.size()  # the ranks of the first part, of the second, ...
        self.experts_there = num_experts * expert_shards // self.destinations
        assert self.experts_there * self.destinations == num_experts * expert_shards

    def dispatch(
        self,
        x_TD: torch.Tensor,
        choices: Choices,
        pad_rows_per_expert: int | None,
        budget: RowBudget | None = None,
    ) -> Dispatched[AllToAllRoute]:
        packed_NW, (route,) = self._pack(x_TD, choices, pad_rows_per_expert, budget)
        packed_MW = self._exchange(packed_NW, route.received_R, route.sent_R)
        wire_bytes = self._wire_bytes(route, row_bytes(packed_NW), row_bytes(x_TD))
        return self._arrived(
            packed_MW, x_TD, choices, pad_rows_per_expert, route, wire_bytes, budget
        )

    def combine(self, y_MD: torch.Tensor, route: AllToAllRoute) -> torch.Tensor:
        y_ND = self._exchange(y_MD, route.sent_R, route.received_R)
        return self.ops.unpermute(y_ND, route.row_map)

    def _pack(
        self,
        x_TD: torch.Tensor,
        choices: Choices,
        pad_rows_per_expert: int | None,
        budget: RowBudget | None = None,
    ) -> tuple[torch.Tensor, list[AllToAllRoute]]:
        """The rows of all parts as they are sent, and the route of each part."""
        numbers_TJ = self._numbers(choices.experts_TK)
        visited_TJ, sent_DC = self.ops.visits(numbers_TJ, self.experts_there, self.destinations)
        padded = most = None
        if pad_rows_per_expert is not None:
            padded = min(len(x_TD), self.experts_there * pad_rows_per_expert)
            sent_DC[:, 0] = padded
        elif budget is not None:
            padded = most = budget.of_messages(sent_DC[:, 0], len(x_TD))
        sizes: list[Any]
        if budget is not None and budget.is_fixed:  # the same on all ranks
            sizes = [[(padded, 0)] * self.destinations] * 2
        else:
            received_DC = self._exchange_counts(sent_DC)
            sizes = self.ops.read_sizes(torch.stack([sent_DC, received_DC]), len(x_TD), padded)
        rows = None if padded is not None else sum(of_rows for of_rows, _ in sizes[0])
        row_map = self.ops.routing_map(visited_TJ, self.destinations, padded, rows, most)
        packed_NW = self.ops.pack_rows(
            x_TD, choices.probs_TK, numbers_TJ, row_map, self.experts_there
        )
        routes = []
        for first in range(0, self.destinations, self.group.size()):
            sent, received = (of_all[first : first + self.group.size()] for of_all in sizes)
            sent_R, received_R = ([of_rows for of_rows, _ in each] for each in (sent, received))
            routes.append(AllToAllRoute(row_map, sent_R, received_R, sum(n for _, n in received)))
        return packed_NW, routes

    def _numbers(self, experts_TK: torch.Tensor) -> torch.Tensor:
        """The shards of the chosen experts, numbered by part, by rank, then by expert: [T, J]."""
        if self.expert_shards == 1 and self.parts == 1:
            return experts_TK
        sizes = (self.parts, -1, self.expert_shards, self.experts_there)
        count = self.destinations * self.experts_there
        numbers = torch.arange(count, device=experts_TK.device).view(sizes)
        numbers_ES = numbers.permute(1, 0, 3, 2).reshape(self.num_experts, self.expert_shards)
        return F.pad(numbers_ES, (0, 0, 0, 1), value=-1)[experts_TK].flatten(1)  # -1: the last

    def _exchange_counts(self, sent_DC: torch.Tensor) -> torch.Tensor:
        """The counts from each destination, which for the ranks is a source."""
        sent_RX = sent_DC.view(self.parts, -1, 2).transpose(0, 1).contiguous()
        received_RX = torch.empty_like(sent_RX)
        with self.progress.during(Phase.DISPATCH):
            dist.all_to_all_single(received_RX, sent_RX, group=self.group)
        return received_RX.transpose(0, 1).reshape(-1, 2)

    def _arrived(
        self,
        packed_MW: torch.Tensor,
        x_TD: torch.Tensor,
        choices: Choices,
        pad_rows_per_expert: int | None,
        route: AllToAllRoute,
        wire_bytes: int,
        budget: RowBudget | None = None,
    ) -> Dispatched[AllToAllRoute]:
        """What the experts here compute with."""
        places = places_of(choices.experts_TK.shape[1], self.experts_there)
        x_MD, experts_MP, probs_MP = unpack_rows(packed_MW, x_TD.shape[1], places)
        count: int | None = route.choices
        most = None
        if pad_rows_per_expert is not None:
            count, pad_rows_per_expert = None, pad_rows_per_expert * self.group.size()
        elif budget is not None:
            most = budget.of_experts(experts_MP)
            count = None if budget.is_fixed else count
        row_map = self.ops.routing_map(
            experts_MP, self.experts_there, pad_rows_per_expert, count, most
        )
        return Dispatched(x_MD, probs_MP, row_map, None, route, wire_bytes)

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
