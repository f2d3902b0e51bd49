"""The balancing bias or the cutoffs of a layer, by the options of its system.

The record of a system names one of these factories as its `bias`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_parallel.balancing.bias import (
    AnchoredBias,
    ExpertBias,
    IntegralDerivativeBias,
    ProportionalBias,
    QuantileBias,
)
from moe_parallel.balancing.cutoffs import ExpertCutoffs, QuantileCutoffs, SignCutoffs
from moe_parallel.config import BiasBalancing, Cutoffs, FixedFreeExperts, Selection
from moe_parallel.layers.expert_layer import LayerConfig

#: (options of a system, configuration of the model, iterations of the run). The iterations are None
#: if no run trains the layer. The result is None if these options have neither bias nor cutoffs.
MakeBias = Callable[[Any, LayerConfig, int | None], ExpertBias | None]


def no_bias(selection: Selection, config: LayerConfig, train_iters: int | None) -> None:
    """Neither a bias nor cutoffs."""


#: The class for each --moe-router-bias-update, and the option that is its second argument.
_UPDATES: dict[str, tuple[Callable[[int, float], ExpertBias], str]] = {
    "sign": (ExpertBias, "moe_router_bias_update_rate"),
    "error": (ProportionalBias, "moe_router_bias_update_rate"),
    "id": (IntegralDerivativeBias, "moe_router_bias_update_rate"),
    "quantile": (QuantileBias, "moe_router_bias_ema"),
}


def balancing_bias(
    selection: BiasBalancing, config: LayerConfig, train_iters: int | None
) -> ExpertBias | None:
    """The balancing bias. None without --moe-router-enable-expert-bias."""
    if not selection.moe_router_enable_expert_bias:
        return None
    n = config.num_moe_experts
    if isinstance(selection, FixedFreeExperts) and selection.free_experts:
        rate = selection.moe_router_bias_update_rate
        assert rate is not None  # `Selection.rescaled` has set it
        return _anchored_bias(selection, rate, n)
    build, option = _UPDATES[selection.moe_router_bias_update]
    return build(n, getattr(selection, option))


def _anchored_bias(selection: FixedFreeExperts, rate: float, num_experts: int) -> AnchoredBias:
    num_free = selection.free_experts
    k, k_e = selection.choices_per_token, selection.moe_ffn_experts_per_token
    if k is None or k_e is None:  # all columns equally loaded
        return AnchoredBias(num_experts, rate, num_free, num_experts + num_free, num_experts)
    return AnchoredBias(num_experts, rate, num_free, k, k_e)


def expert_cutoffs(
    selection: Cutoffs, config: LayerConfig, train_iters: int | None
) -> ExpertCutoffs:
    """The cutoffs that a score must exceed."""
    n, k = config.num_moe_experts, selection.mean_choices
    start = selection.first_cutoff(config.hidden_size, n, config.init_method_std)
    if selection.moe_threshold_update == "sign":
        return SignCutoffs(n, start, k, selection.moe_threshold_update_rate)
    return QuantileCutoffs(n, start, k, selection.ema(train_iters))


#: The options that ask for a bias or for cutoffs, with the factory for each.
BIAS_FOR: dict[type[Selection], MakeBias] = {
    BiasBalancing: balancing_bias,
    Cutoffs: expert_cutoffs,
}
