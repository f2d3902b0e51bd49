"""Replayed choices: a recorded run says which experts compute a token; the scores say how much.

Shape suffixes: T tokens of this rank, K slots per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from moe_parallel.copies import copied_to
from moe_parallel.selection.choices import BiasedRule, Choices
from moe_parallel.selection.forced import ForcibleRule
from moe_parallel.selection.threshold import Threshold
from moe_parallel.selection.tokens import Tokens

#: (tokens, T, every) -> int64 [T, K] on the host: the recorded choices of T tokens, which are every
#: `every`-th of their sequences.
Recorded = Callable[[Tokens, int, int], torch.Tensor]


@dataclass(frozen=True)
class Replayed:
    """The recorded choices in place of those of `rule`, with the probs that it gives to them.

    The recorded order of the slots remains, so that choices which `rule` makes itself give the same
    probs to the bit. The probs are functions of the current scores, so gradients flow as always.
    """

    rule: ForcibleRule
    recorded: Recorded
    every: int = 1  # the tokens between two that it routes: the length of a segment

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        return self.rule.of(scores_TE, self.chosen(scores_TE, tokens))

    def chosen(self, scores_TE: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """The recorded choices of tokens with these scores: int64 [T, K]."""
        recorded_TK = self.recorded(tokens, len(scores_TE), self.every)
        return copied_to(scores_TE.device, recorded_TK)

    def with_bias(self, bias_E: torch.Tensor) -> Replayed:
        """A bias changes no recorded choice, but the probs of a threshold may depend on it."""
        if isinstance(self.rule, Threshold):
            return replace(self, rule=self.rule.with_bias(bias_E))
        return self

    def ranked(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The values by which `rule` ranks experts, so that a bias moves as in a run of its own."""
        return cast(BiasedRule, self.rule).ranked(scores_TE)
