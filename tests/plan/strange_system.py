"""A system of which no plan knows: tokens pass a matrix of its own, and ranks add up a number."""

from dataclasses import dataclass
from typing import Any

import torch

from moe_parallel.config import FixedChoices, RoutedSelection
from moe_parallel.layers import RoutedLayer, Rules, System, register
from moe_parallel.parallel import sum_over
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK


@dataclass(frozen=True)
class StrangeSelection(FixedChoices, RoutedSelection, system="strange"):
    """Top-K of tokens that were mixed first."""


class StrangeLayer(RoutedLayer):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        width = self.config.hidden_size
        self.add_replicated_weight("w_mix_DD", width, width)
        self.register_buffer("seen", torch.zeros(3, width))

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        mixed_TD = torch.sin(x_TD @ self.replicated(self.w_mix_DD))
        mean_D = sum_over(mixed_TD.mean(0), self.context.groups.tp)
        return super().choose(mixed_TD + mean_D, tokens)


def rules(selection: StrangeSelection) -> Rules:
    rule = TopK(selection.moe_router_topk)
    return Rules(rule, rule)


register(System(StrangeSelection, layer=StrangeLayer, rules=rules))
