"""relu: every expert with a positive router logit (ReMoE, Wang et al. 2025)."""

from __future__ import annotations

from moe_parallel.balancing.controller import LossCoefficient
from moe_parallel.config import ReLUSelection
from moe_parallel.layers import RoutedLayer, Rules, System
from moe_parallel.layers.routing_losses import coupling, l1
from moe_parallel.selection.relu import ReLU
from moe_parallel.systems.registry import register


def rules(selection: ReLUSelection) -> Rules:
    return Rules(ReLU(), ReLU())


def controller(
    selection: ReLUSelection, num_experts: int, train_iters: int | None
) -> LossCoefficient:
    return LossCoefficient(
        selection.initial_coefficient(train_iters),
        selection.moe_relu_target_experts,
        selection.moe_relu_l1_coeff_multiplier,
    )


RELU = register(
    System(
        ReLUSelection,
        layer=RoutedLayer,
        rules=rules,
        losses=(l1, coupling),
        controller=controller,
    )
)
