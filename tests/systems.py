"""Every system of expert selection with its options in use, for a model of four experts."""

from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from moe_parallel.config import MergedSelection
from moe_parallel.platform.megatron import WITH_MUON, installed_version
from moe_parallel.systems import SELECTIONS

Options = dict[str, Any]

#: Without rounding to bf16, which would hide what a layout changes.
MUON: Options = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
#: Where Megatron-Core has its Muon, a missing emerging-optimizers is a failure.
needs_muon = pytest.mark.skipif(
    installed_version() not in SpecifierSet(WITH_MUON),
    reason=f"{installed_version()} of megatron-core has no Muon that runs on this Python",
)

_AUTONOMOUS = {"aoe_low_rank_size": 8, "aoe_wide_size": 20}

#: The name is that of the system; the part after a comma names the variant. The coefficients of
#: the auxiliary losses are larger than usual, so that an error in these losses shows.
SYSTEMS: dict[str, Options] = {
    "topk": {
        "moe_aux_loss_coeff": 0.05,
        "moe_z_loss_coeff": 0.01,
        "moe_erc_loss_coeff": 0.5,
        "moe_erc_alpha": 0.5,
    },
    "topk, one expert": {
        "moe_router_topk": 1,
        "moe_aux_loss_coeff": 0.05,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update": "id",
        "moe_router_bias_update_rate": 0.05,
    },
    "topk, sigmoid, groups, bias, shared expert": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_shared_expert_intermediate_size": 32,
    },
    "topk, large router, factorized W_g, global loss": {
        "moe_router_hidden_size": 12,
        "moe_gate_low_rank_size": 8,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.05,
        "moe_importance_loss_coeff": 0.02,
        "moe_aux_loss_per_choice": True,
    },
    "top_p": {"moe_top_p": 0.5, "moe_entropy_loss_coeff": 0.02, "moe_aux_loss_coeff": 0.05},
    "top_p, a moving p": {
        "moe_top_p": 0.5,
        "moe_top_p_target_experts": 2.5,
        "moe_top_p_proportional_gain": 0.25,
        "moe_top_p_integral_gain": 0.1,
        "moe_top_p_renormalize": True,
        "moe_aux_loss_coeff": 0.05,
    },
    "relu": {"moe_relu_target_experts": 1.5, "moe_relu_l1_coeff_init": 1e-4},
    "expert_choice": {
        "moe_z_loss_coeff": 0.01,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
    },
    "aoe": _AUTONOMOUS | {"moe_aux_loss_coeff": 0.05},
    "aoe, by bias": _AUTONOMOUS
    | {
        "moe_aux_loss_coeff": 0.0,
        "aoe_gradient": "selected",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update": "quantile",
        "moe_router_bias_ema": 0.25,
    },
    "aoe, probs over all": _AUTONOMOUS
    | {"moe_aux_loss_coeff": 0.05, "aoe_gate": "all", "moe_importance_loss_coeff": 0.02},
    "aoe_top_p": _AUTONOMOUS | {"moe_aux_loss_coeff": 0.05, "moe_entropy_loss_coeff": 0.02},
    "aoe_expert_choice": _AUTONOMOUS | {"moe_expert_choice_scores": "softmax"},
    "lory": {"lory_segment_length": 3},  # the last segment is shorter
    "lory, uniform first segment": {"lory_segment_length": 4, "lory_first_segment": "uniform"},
    "lory_prefix": {"lory_segment_length": 3},
    "smear": {"smear_sees_the_future": True, "smear_expert_dropout": 0.0},
    "segment_expert_choice": {
        "lory_segment_length": 3,
        "moe_expert_choice_capacity_factor": 2.0,
        "moe_z_loss_coeff": 0.01,
    },
    "hash": {"moe_z_loss_coeff": 0.01},
    "topk, free experts": {
        "moe_zero_experts": 1,
        "moe_copy_experts": 1,
        "moe_constant_experts": 1,
        "moe_free_expert_tau": 0.5,
        "moe_aux_loss_coeff": 0.05,
    },
    "aoe, free experts": _AUTONOMOUS
    | {
        "moe_copy_experts": 2,
        "moe_aux_loss_coeff": 0.0,
        "aoe_gradient": "selected",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update": "error",
        "moe_router_bias_update_rate": 0.1,
        "moe_ffn_experts_per_token": 1.5,
    },
    "uoe": {
        "moe_aux_loss_coeff": 0.05,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
    "threshold": {
        "moe_shared_expert_intermediate_size": 32,
        "moe_threshold_target_experts": 3.0,
        "moe_threshold_ema": 0.0,
    },
    "routing_free": _AUTONOMOUS | {"routing_free_coeff_init": 0.5},
    "aoe_threshold": _AUTONOMOUS
    | {"moe_threshold_update": "sign", "moe_threshold_update_rate": 0.05},
    "topk, by quantiles": {
        "moe_aux_loss_coeff": 0.0,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update": "quantile",
        "moe_router_bias_ema": 0.25,
    },
    "topk, a free expert, by error": {
        "moe_zero_experts": 1,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update": "error",
        "moe_router_bias_update_rate": 0.1,
    },
    "threshold, by sign": {
        "moe_threshold_target_experts": 1.5,
        "moe_threshold_update": "sign",
        "moe_threshold_update_rate": 0.05,
    },
    "aoe_top_p, a moving p": _AUTONOMOUS
    | {
        "moe_top_p_target_experts": 2.5,
        "moe_top_p_proportional_gain": 0.25,
        "moe_top_p_integral_gain": 0.1,
        "moe_aux_loss_coeff": 0.05,
    },
    "corm": {"moe_aux_loss_coeff": 0.05, "corm_key_size": 8, "corm_reference_rate": 0.25},
}


def options(name: str) -> Options:
    """The options of a system, including `expert_selection`."""
    return {"expert_selection": name.split(",")[0]} | SYSTEMS[name]


def merges(name: str) -> bool:
    """Whether experts are merged. Tensor parallelism then splits them; no token is dispatched."""
    return issubclass(SELECTIONS[name.split(",")[0]], MergedSelection)
