"""smear: the mean of a sequence gives its merge weights (Muqeeth et al. 2023); not causal."""

from __future__ import annotations

from moe_parallel.config import SmearSelection
from moe_parallel.layers import Rules, SmearLayer, System
from moe_parallel.layers.system import keeps_output
from moe_parallel.selection.expert_dropout import ExpertDropout
from moe_parallel.systems.registry import register


def rules(selection: SmearSelection) -> Rules:
    return Rules(ExpertDropout(selection.smear_expert_dropout), ExpertDropout(0))


SMEAR = register(System(SmearSelection, layer=SmearLayer, rules=rules, upcycling=keeps_output))
