"""lory, lory_prefix, segment_expert_choice: the mean of an earlier segment routes a segment.

The rules on segments are in `selection.segments`, because all merged layers use them.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_parallel.layers import MergedLayer, RoutedLayer, Rules, System, register
from moe_parallel.layers.expert_layer import LayerConfig, LayerContext
from moe_parallel.layers.system import keeps_output
from moe_parallel.selection.rules import FIRST_SEGMENT
from moe_parallel.selection.segments import (
    BySegment,
    Merges,
    by_first,
    by_previous,
    segment_sizes,
)
from moe_parallel.systems.expert_choice import rule as expert_choice
from moe_parallel.systems.lory import (
    LoryPrefixSelection,
    LorySelection,
    SegmentExpertChoiceSelection,
)


class LoryLayer(MergedLayer):
    """Lory: the previous segment gives the merge weights. Or prefix routing: the first does."""

    def __init__(
        self,
        config: LayerConfig,
        selection: LorySelection | LoryPrefixSelection,
        expert_width: int,
        context: LayerContext,
        system: System,
        **_: Any,  # what later versions of Megatron-Core add
    ) -> None:
        super().__init__(config, selection, expert_width, context, system)
        self.length = selection.lory_segment_length
        self.first = FIRST_SEGMENT[selection.lory_first_segment]

    def merges(self, x_SBD: torch.Tensor) -> Merges:
        rule, length = self.current_rule(), self.length
        means_GBD, tokens = self.segment_means(x_SBD, length)
        if rule is by_first:
            means_GBD = means_GBD[:1]
        merges = rule(self.weights(means_GBD), segment_sizes(tokens, length), self.first)
        return self.of_this_rank(merges, tokens)


def rules(selection: LorySelection) -> Rules:
    return Rules(by_previous, by_first if selection.lory_inference == "prompt" else by_previous)


LORY = register(System(LorySelection, layer=LoryLayer, rules=rules, upcycling=keeps_output))
LORY_PREFIX = register(
    System(
        LoryPrefixSelection,
        layer=LoryLayer,
        rules=lambda _: Rules(by_first, by_first),
        upcycling=keeps_output,
    )
)


def rules_by_segment(selection: SegmentExpertChoiceSelection) -> Rules:
    training, evaluation = expert_choice.rules(selection)
    length = selection.lory_segment_length
    return Rules(BySegment(training, length), BySegment(evaluation, length))


SEGMENT_EXPERT_CHOICE = register(
    System(
        SegmentExpertChoiceSelection,
        layer=RoutedLayer,
        rules=rules_by_segment,
    )
)
