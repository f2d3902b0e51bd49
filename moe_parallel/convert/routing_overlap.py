"""Measures how far two layers choose the same experts for the same tokens.

Shape suffixes: T tokens, K choices per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_parallel.selection.choices import Choices


@dataclass(frozen=True)
class RoutingOverlap:
    """Shares from 0 to 1 over tokens."""

    choices: float  # share of the first layer's choices that the second makes too
    all_choices: float  # share of tokens for which all choices are the same
    first_choice: float  # share of tokens whose first choices (largest probs) are the same
    probs: float  # half the sum of |difference of probs| over the experts: 0 equal, 1 disjoint


def routing_overlap(of: Choices, by: Choices) -> RoutingOverlap:
    """The share of the choices `of` one layer that are also made `by` another. Both layers fill
    all K slots."""
    same_TK = (of.experts_TK[:, :, None] == by.experts_TK[:, None, :]).any(2).double()
    return RoutingOverlap(
        choices=float(same_TK.mean()),
        all_choices=float(same_TK.amin(1).mean()),
        first_choice=float((of.experts_TK[:, 0] == by.experts_TK[:, 0]).double().mean()),
        probs=float((_by_expert(of) - _by_expert(by)).abs().sum(1).mean() / 2),
    )


def _by_expert(choices: Choices) -> torch.Tensor:
    """The probs by expert, 0 for the experts that are not chosen: [T, E]."""
    empty_TE = torch.zeros_like(choices.scores_TE)
    return empty_TE.scatter(1, choices.experts_TK, choices.probs_TK.to(empty_TE))
