"""threshold, aoe_threshold: each expert takes the tokens whose score is above its own cutoff."""

from __future__ import annotations

from moe_parallel.config import AoEThresholdSelection, ThresholdSelection
from moe_parallel.layers import AutonomousLayer, RoutedLayer, Rules, System
from moe_parallel.layers.bias import expert_cutoffs
from moe_parallel.layers.routing_losses import coupling
from moe_parallel.selection import threshold
from moe_parallel.selection.threshold import Threshold
from moe_parallel.systems.registry import register

_PROBS = {"softmax": threshold.softmax_of_scores, "sigmoid": threshold.sigmoid_of_value}


def rules(selection: ThresholdSelection) -> Rules:
    rule = Threshold(threshold.sigmoid)
    return Rules(rule, rule)


def rules_of_norms(selection: AoEThresholdSelection) -> Rules:
    rule = Threshold(_PROBS[selection.aoe_threshold_gate])
    return Rules(rule, rule)


THRESHOLD = register(
    System(
        ThresholdSelection,
        layer=RoutedLayer,
        rules=rules,
        losses=(coupling,),
        bias=expert_cutoffs,
    )
)
AOE_THRESHOLD = register(
    System(AoEThresholdSelection, layer=AutonomousLayer, rules=rules_of_norms, bias=expert_cutoffs)
)
