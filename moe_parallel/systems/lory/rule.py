"""lory, lory_prefix, segment_expert_choice: the mean of an earlier segment routes a segment.

The rules on segments are in `selection.segments`, because all merged layers use them.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_parallel.experts.merged import MERGED_AT_ONCE
from moe_parallel.layers import MergedLayer, RoutedLayer, Rules, System, register
from moe_parallel.layers.expert_layer import LayerConfig, LayerContext
from moe_parallel.layers.system import keeps_output
from moe_parallel.selection.segments import (
    FIRST_SEGMENT,
    BySegment,
    Merges,
    RunningSegments,
    by_first,
    by_previous,
    own,
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
        past, rule, length, first = self.past, self.current_rule(), self.length, self.first
        if past is not None and not past.is_empty:
            return self._continued(x_SBD, past.segments[self.layer_number])
        if past is not None:
            if past.prompt_length is not None:
                rule, length, first = by_first, past.prompt_length, own
            past.segments[self.layer_number] = RunningSegments.after(
                x_SBD, length, only_first=rule is by_first
            )
        means_GBD, tokens = self.segment_means(x_SBD, length)
        if rule is by_first:
            means_GBD = means_GBD[:1]
        merges = rule(self.weights(means_GBD), segment_sizes(tokens, length), first)
        return self.of_this_rank(merges, tokens)

    def _compute(self, x_MTBD: torch.Tensor, weights_MBE: torch.Tensor) -> torch.Tensor:
        past = self.past
        if past is None or past.is_empty or not past.by_prompt:
            return super()._compute(x_MTBD, weights_MBE)
        if weights_MBE.shape[1] > MERGED_AT_ONCE:  # to keep them all would need more memory
            return super()._compute(x_MTBD, weights_MBE)
        if self.layer_number not in past.merged:
            past.merged[self.layer_number] = self.experts.merged(weights_MBE[0])
        x_BTD = x_MTBD[0].transpose(0, 1)
        y_BTD = self.experts.compute(x_BTD, past.merged[self.layer_number])
        return y_BTD.transpose(0, 1)

    def _continued(self, x_1BD: torch.Tensor, segments: RunningSegments) -> Merges:
        """The merges for one more token of each sequence."""
        e_1BE = self.weights(segments.mean_BX)[None]
        complete_B1 = segments.complete_B[:, None]
        weights_1BE = torch.where(complete_B1, e_1BE, self.first(e_1BE))
        segments.add(x_1BD[0])
        return Merges([1], weights_1BE)


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
