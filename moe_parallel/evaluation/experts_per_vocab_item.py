"""Counts the experts that each vocabulary item takes (Huang et al. 2024, section 5.3).

If the number of experts per token varies, it shows which tokens are hard for a model. Shape
suffixes: B sequences, S tokens of a sequence, T = S * B tokens, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from moe_parallel.layers import DispatchedLayer
from moe_parallel.model.forward import Batch
from moe_parallel.selection.choices import BiasedRule, Choices, Rule
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class ItemCounts:
    """Counts for each vocabulary item, over the input tokens."""

    tokens_V: torch.Tensor  # int64: the number of times that it occurred
    experts_V: torch.Tensor  # fp64: the experts chosen for it, summed over tokens, mean over layers

    def experts_per_token(self, at_least: int) -> list[tuple[int, int, float]]:
        """(item, times, experts per token), most experts first.

        Includes only items that occur at least `at_least` times: the mean of few says little.
        """
        items = torch.nonzero(self.tokens_V >= max(1, at_least)).flatten().tolist()
        found = [
            (item, int(self.tokens_V[item]), float(self.experts_V[item] / self.tokens_V[item]))
            for item in items
        ]
        return sorted(found, key=lambda row: (-row[2], row[0]))


@torch.no_grad()
def experts_per_vocab_item(model: Any, batches: Iterable[Batch], vocab_size: int) -> ItemCounts:
    """Run the model on the batches in evaluation mode, and count the experts of each item.

    Args:
        model: a complete GPT (Megatron-Core's) on one process; left in evaluation mode. Merged
            layers and dense layers are not counted.
        batches: tokens, position_ids and loss_mask [B, S]; tokens outside the loss mask are not
            counted.
        vocab_size: the vocabulary size of the tokenizer.
    """
    device = next(model.parameters()).device
    tokens_V = torch.zeros(vocab_size, dtype=torch.int64, device=device)
    experts_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
    model.eval()
    with _counting(model) as counts:
        for batch in batches:
            counts.clear()
            items_BS = batch["tokens"].to(device)
            model(items_BS, batch["position_ids"].to(device), None)
            if not counts:
                break
            read_T = batch["loss_mask"].to(device).t().flatten() > 0  # layers have [S, B]
            items_T = items_BS.t().flatten()[read_T]
            experts_T = torch.stack(counts).double().mean(dim=0)[read_T]
            tokens_V += torch.bincount(items_T, minlength=vocab_size)
            experts_V.index_add_(0, items_T, experts_T)
    return ItemCounts(tokens_V, experts_V)


@dataclass(frozen=True)
class _Counted:
    """A rule that records the number of experts that it chose for each token."""

    rule: Rule
    layer: DispatchedLayer
    counts: list[torch.Tensor]

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        choices = self.rule(scores_TE, tokens)
        computed_TK = self.layer.dispatched(choices).experts_TK >= 0
        self.counts.append(computed_TK.sum(dim=1))
        return choices

    def with_bias(self, bias_E: torch.Tensor) -> _Counted:
        return replace(self, rule=cast(BiasedRule, self.rule).with_bias(bias_E))


@contextmanager
def _counting(model: Any) -> Iterator[list[torch.Tensor]]:
    """Inside, collects from each dispatched layer the number of experts of each token, [T], in
    order. Restores the rules at the end."""
    counts: list[torch.Tensor] = []
    layers = [layer for layer in model.modules() if isinstance(layer, DispatchedLayer)]
    rules = [layer.evaluation_rule for layer in layers]
    for layer, rule in zip(layers, rules, strict=True):
        layer.evaluation_rule = _Counted(rule, layer, counts)
    try:
        yield counts
    finally:
        for layer, rule in zip(layers, rules, strict=True):
            layer.evaluation_rule = rule
