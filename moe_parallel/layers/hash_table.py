"""The table of --expert-selection hash: the experts of each token id.

Shape suffixes: V token ids, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from moe_parallel.config import Config
from moe_parallel.selection.forced import ForcibleRule
from moe_parallel.selection.hash_routing import ByTokenId, greedy_table


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
