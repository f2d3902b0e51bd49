"""Hash routing: the id of a token chooses its experts, by a table that is never trained.

Shape suffixes: V token ids, T tokens of this rank, K experts per token, E experts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_parallel.selection.choices import Choices, best_first
from moe_parallel.selection.forced import ForcibleRule
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class ByTokenId:
    """The experts of the token's id (Roller et al. 2021; DeepSeek-V4, its first layers).

    The scores choose nothing. `rule` computes from them how much each expert counts.
    """

    rule: ForcibleRule
    experts_of: Callable[[torch.Tensor], torch.Tensor]  # ids, int64 [T] -> experts, int64 [T, K]

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        assert tokens.ids_T is not None, "the model passes no token ids to this layer"
        return self.of(scores_TE, best_first(scores_TE, self.experts_of(tokens.ids_T)))

    def of(self, scores_TE: torch.Tensor, experts_TK: torch.Tensor) -> Choices:
        """The choices of experts that are given."""
        return self.rule.of(scores_TE, experts_TK)


def greedy_table(counts: Sequence[int], num_experts: int, k: int) -> torch.Tensor:
    """The experts of each token id: int64 [V, K], by greedy filling.

    Ids are placed one by one, the most frequent first. Each goes to the k experts with the smallest
    load so far, and adds its frequency to theirs. On a tie, the lower id and the lower expert come
    first. A frequency is the count plus 1, so ids that do not occur are spread evenly too. Without
    any counts, id v therefore goes to the experts v k, ..., v k + k - 1, modulo their number, as
    long as k divides it.

    Args:
        counts: for each id, how often it occurs in the training text.
    """
    loads = [(0, expert) for expert in range(num_experts)]  # a heap
    table: list[list[int]] = [[]] * len(counts)
    for item in sorted(range(len(counts)), key=lambda item: -counts[item]):
        taken = [heapq.heappop(loads) for _ in range(k)]
        table[item] = [expert for _, expert in taken]
        for load, expert in taken:
            heapq.heappush(loads, (load + counts[item] + 1, expert))
    return torch.tensor(table, dtype=torch.int64).view(-1, k)
