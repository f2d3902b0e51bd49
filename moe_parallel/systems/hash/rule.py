"""hash: the id of a token selects its experts, by a frozen table. It is a control.

Shape suffixes: V token ids, T tokens of this rank, K experts per token, E experts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moe_parallel.config import Config
from moe_parallel.layers import LayerContext, RoutedLayer, Rules, System, register
from moe_parallel.layers.system import SCALED_OUTPUT
from moe_parallel.selection.choices import Choices, best_first
from moe_parallel.selection.forced import ForcibleRule
from moe_parallel.selection.rules import raw_probability, softmax_of_selected
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.hash import HashSelection


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


class HashTable(nn.Module):
    """`experts_VK`, int64, is saved with the model and never changes."""

    experts_VK: torch.Tensor

    def __init__(self, experts_VK: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("experts_VK", experts_VK.clone())

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> int64 [T, K]."""
        return self.experts_VK[ids_T]

    def of(self, rule: ForcibleRule) -> ByTokenId:
        """`rule` with the experts of this table."""
        return ByTokenId(rule, self)


def build_hash_table(
    config: Config, vocab_size: int, token_counts: Sequence[int]
) -> torch.Tensor | None:
    """The table of a new model: int64 [V, K]. Returns None if token ids choose no experts.

    Args:
        vocab_size: V, of the model.
        token_counts: how often the ids 0, 1, ... occur in the training text; others occur 0 times.
    """
    if config.moe.num_experts is None or not config.selection.reads_token_ids:
        return None
    k = config.selection.choices_per_token
    assert k is not None
    unseen = [0] * (vocab_size - len(token_counts))
    return greedy_table([*token_counts, *unseen], config.num_experts, k)


def rules(selection: HashSelection) -> Rules:
    """The rule that weights the experts; the layer's table chooses them."""
    k = selection.moe_router_topk
    rule = TopK(k, raw_probability if k == 1 else softmax_of_selected)
    return Rules(rule, rule)


def table(context: LayerContext) -> HashTable:
    assert context.hash_table_VK is not None, "the table of a new model was not built"
    return HashTable(context.hash_table_VK)


def upcycling(selection: HashSelection) -> str | None:
    return SCALED_OUTPUT if selection.moe_router_topk == 1 else None


HASH = register(
    System(
        HashSelection,
        layer=RoutedLayer,
        rules=rules,
        upcycling=upcycling,
        table=table,
    )
)
