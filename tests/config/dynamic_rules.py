"""Broken rules of the systems whose tokens take different numbers of experts."""

from tests.config.test_validate import AOE

TOP_P = {"expert_selection": "top_p"}
AOE_TOP_P = AOE | {"expert_selection": "aoe_top_p"}
THRESHOLD = {"expert_selection": "threshold"}
ROUTING_FREE = AOE | {"expert_selection": "routing_free"}
AOE_THRESHOLD = AOE | {"expert_selection": "aoe_threshold"}
RELU = {"expert_selection": "relu"}
EXPERT_CHOICE = {"expert_selection": "expert_choice"}
SEGMENTS = {"expert_selection": "segment_expert_choice", "lory_segment_length": 4}

BROKEN = [
    # top-p
    (TOP_P | {"moe_top_p": 0}, 1, "--moe-top-p is 0.0: it must be above 0"),
    (TOP_P | {"moe_top_p": 1.01}, 1, "--moe-top-p is 1.01: it must be at most 1"),
    (AOE_TOP_P | {"moe_top_p": -1}, 1, "--moe-top-p is -1.0: it must be above 0"),
    (
        TOP_P | {"moe_top_p_target_experts": 5.0},
        1,
        "--moe-top-p-target-experts is 5.0, above --num-experts 4: choose at most 4, or none",
    ),
    (
        TOP_P | {"moe_top_p_target_experts": 0.5},
        1,
        "--moe-top-p-target-experts is 0.5: it must be at least 1",
    ),
    (
        AOE_TOP_P | {"moe_top_p_integral_gain": 0.1},
        1,
        "--moe-top-p-integral-gain is 0.1, but p is fixed: set --moe-top-p-target-experts",
    ),
    (
        TOP_P | {"moe_top_p_proportional_gain": 0.1},
        1,
        "--moe-top-p-proportional-gain is 0.1, but p is fixed",
    ),
    (
        TOP_P | {"moe_top_p_target_experts": 2.0, "moe_top_p_integral_gain": 0.0},
        1,
        "--moe-top-p-integral-gain is 0.0: it must be above 0",
    ),
    (
        TOP_P | {"moe_top_p_target_experts": 2.0, "moe_top_p_proportional_gain": -1.0},
        1,
        "--moe-top-p-proportional-gain is -1.0: it must be at least 0",
    ),
    (
        RELU | {"moe_relu_target_experts": 4.5},
        1,
        "--moe-relu-target-experts is 4.5, above --num-experts 4: choose at most 4",
    ),
    (RELU | {"moe_relu_target_experts": 0}, 1, "--moe-relu-target-experts is 0.0: .* above 0"),
    (RELU | {"moe_relu_l1_coeff_init": 0}, 1, "--moe-relu-l1-coeff-init is 0.0: .* above 0"),
    (
        RELU | {"moe_relu_l1_coeff_multiplier": 1.0},
        1,
        "--moe-relu-l1-coeff-multiplier is 1.0: it must be above 1",
    ),
    (RELU | {"moe_z_loss_coeff": 0.1}, 1, "--moe-z-loss-coeff is 0.1, but .* relu has no softmax"),
    (
        RELU | {"moe_expert_capacity_factor": 1.0},
        1,
        "--moe-expert-capacity-factor is 1.0, but with --expert-selection relu a token starts",
    ),
    (TOP_P | {"moe_inference_top_p": 0}, 1, "--moe-inference-top-p is 0.0: it must be above 0"),
    (TOP_P | {"moe_inference_top_p": 2}, 1, "--moe-inference-top-p is 2.0: it must be at most 1"),
    (TOP_P | {"moe_inference_max_experts": 0}, 1, "--moe-inference-max-experts is 0: .* least 1"),
    (
        TOP_P | {"moe_inference_max_experts": 5},
        1,
        "--moe-inference-max-experts is 5, above --num-experts 4: choose at most 4, or none",
    ),
    (TOP_P | {"moe_entropy_loss_coeff": -1}, 1, "--moe-entropy-loss-coeff is -1.0: .* at least 0"),
    # thresholds
    (
        THRESHOLD | {"moe_threshold_target_experts": 0},
        1,
        "--moe-threshold-target-experts is 0.0: it must be above 0",
    ),
    (
        THRESHOLD | {"moe_threshold_target_experts": 4.0},
        1,
        "--moe-threshold-target-experts is 4.0, not below --num-experts 4, .* every token: lower",
    ),
    (THRESHOLD | {"moe_threshold_ema": 1}, 1, "--moe-threshold-ema is 1.0: it must be below 1"),
    (
        THRESHOLD | {"moe_threshold_ema": 0.5, "moe_threshold_update": "sign"},
        1,
        "--moe-threshold-ema is 0.5, but --moe-threshold-update is sign: set it to quantile, or",
    ),
    (
        THRESHOLD | {"moe_threshold_update_rate": 0.5},
        1,
        "--moe-threshold-update-rate is 0.5, but --moe-threshold-update is quantile: set it to",
    ),
    (
        THRESHOLD | {"moe_threshold_update_rate": 0},
        1,
        "--moe-threshold-update-rate is 0.0: it must be above 0",
    ),
    (THRESHOLD | {"moe_z_loss_coeff": 1e-3}, 1, "--moe-z-loss-coeff is 0.001, .* has no softmax"),
    (
        AOE_THRESHOLD | {"moe_expert_capacity_factor": 2.0},
        1,
        "--moe-expert-capacity-factor is 2.0, but .* depends on later tokens, .*: leave it out",
    ),
    (
        AOE_THRESHOLD | {"aoe_gradient": "selected"},
        1,
        "--aoe-gradient is selected, but probs that are a softmax over all norms",
    ),
    # Routing-Free MoE
    (
        ROUTING_FREE | {"routing_free_target_experts": 4.5},
        1,
        "--routing-free-target-experts is 4.5, above --num-experts 4: choose at most 4",
    ),
    (ROUTING_FREE | {"routing_free_target_experts": 0}, 1, "--routing-free-target-experts is 0.0"),
    (
        ROUTING_FREE | {"routing_free_threshold": 0},
        1,
        "--routing-free-threshold is 0.0: .* above 0",
    ),
    (ROUTING_FREE | {"routing_free_expert_share": 2}, 1, "-expert-share is 2.0: .* at most 1"),
    (ROUTING_FREE | {"routing_free_coeff_init": 2}, 1, "-coeff-init is 2.0: it must be at most 1"),
    (ROUTING_FREE | {"routing_free_coeff_multiplier": 1}, 1, "-multiplier is 1.0: .* above 1"),
    (
        ROUTING_FREE | {"moe_expert_capacity_factor": 2.0},
        1,
        "--moe-expert-capacity-factor is 2.0, but .* depends on later tokens, .*: leave it out",
    ),
    # experts choose
    (
        EXPERT_CHOICE | {"moe_expert_choice_capacity_factor": 0},
        1,
        "--moe-expert-choice-capacity-factor is 0.0: it must be above 0",
    ),
    (
        EXPERT_CHOICE | {"moe_expert_choice_capacity_factor": 4.5},
        1,
        "--moe-expert-choice-capacity-factor is 4.5, above --num-experts 4: .* already",
    ),
    (SEGMENTS | {"lory_segment_length": 17}, 1, "--lory-segment-length is 17, above --seq-length"),
]
