"""expert_choice, segment_expert_choice, aoe_expert_choice: experts choose tokens or segments.

In evaluation, tokens or segments choose experts, because an expert's choice uses later tokens.
"""

from __future__ import annotations

import math

from moe_parallel.config import (
    AoEExpertChoiceSelection,
    ExpertChoiceSelection,
    ExpertsChoose,
    SegmentExpertChoiceSelection,
)
from moe_parallel.layers import AutonomousLayer, RoutedLayer, Rules, System
from moe_parallel.layers.routing_losses import coupling, z
from moe_parallel.selection import topk
from moe_parallel.selection.expert_choice import ExpertChoice, raw
from moe_parallel.selection.segments import BySegment
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.registry import register


def rules(selection: ExpertsChoose) -> Rules:
    factor = selection.moe_expert_choice_capacity_factor
    by_probability = selection.moe_expert_choice_scores == "softmax"
    ranking = topk.softmax if by_probability else raw
    probs = topk.raw_probability if by_probability else topk.raw_score
    # In evaluation a token takes the mean number of experts in training, with a half rounded up.
    return Rules(ExpertChoice(factor, ranking), TopK(max(1, math.floor(factor + 0.5)), probs))


def rules_by_segment(selection: SegmentExpertChoiceSelection) -> Rules:
    training, evaluation = rules(selection)
    length = selection.lory_segment_length
    return Rules(BySegment(training, length), BySegment(evaluation, length))


EXPERT_CHOICE = register(
    System(ExpertChoiceSelection, layer=RoutedLayer, rules=rules, losses=(z, coupling))
)
SEGMENT_EXPERT_CHOICE = register(
    System(
        SegmentExpertChoiceSelection,
        layer=RoutedLayer,
        rules=rules_by_segment,
        losses=(z, coupling),
    )
)
AOE_EXPERT_CHOICE = register(System(AoEExpertChoiceSelection, layer=AutonomousLayer, rules=rules))
