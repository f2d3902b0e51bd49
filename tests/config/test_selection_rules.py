"""Each rule of each expert-selection system is broken once; each error says what to do."""

from typing import Any

import pytest

from moe_parallel.config import make_config, validate
from moe_parallel.config.config import common_options, selection_options
from moe_parallel.errors import InputError
from moe_parallel.systems import SELECTIONS
from tests.config import test_fp8, test_validate
from tests.config.test_validate import AOE, VALID, refuse

TOP_P = {"expert_selection": "top_p"}
AOE_TOP_P = AOE | {"expert_selection": "aoe_top_p"}
THRESHOLD = {"expert_selection": "threshold"}
ROUTING_FREE = AOE | {"expert_selection": "routing_free"}
AOE_THRESHOLD = AOE | {"expert_selection": "aoe_threshold"}
RELU = {"expert_selection": "relu"}
EXPERT_CHOICE = {"expert_selection": "expert_choice"}
SEGMENTS = {"expert_selection": "segment_expert_choice", "lory_segment_length": 4}
AOE_EXPERT_CHOICE = AOE | {"expert_selection": "aoe_expert_choice"}
LORY = {"expert_selection": "lory", "lory_segment_length": 4}
PREFIX = {"expert_selection": "lory_prefix", "lory_segment_length": 4}
CORM = {"expert_selection": "corm"}
UOE = {"expert_selection": "uoe"}
ERC = {"moe_erc_loss_coeff": 1.0}
SMEAR = {"expert_selection": "smear", "smear_sees_the_future": True}
SHARED = {"moe_shared_expert_intermediate_size": 48}
TP = {"tensor_model_parallel_size": 2}
OWN_DOCUMENTS = {"reset_attention_mask": True}
NO_LOSS = {"moe_aux_loss_coeff": 0.0}
COPIES = {"moe_copy_experts": 2}
ANCHORED = {"moe_router_enable_expert_bias": True, "moe_router_bias_update": "error"}
QUANTILE = {"moe_router_enable_expert_bias": True, "moe_router_bias_update": "quantile"}


@pytest.mark.parametrize(
    ("options", "world"),
    [
        ({}, 1),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, 1),
        ({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}, 1),
        ({"moe_router_hidden_size": 7, "moe_gate_low_rank_size": 8}, 1),
        ({"expert_selection": "hash", "moe_gate_low_rank_size": 8}, 1),
        (COPIES | {"moe_zero_experts": 1, "moe_zero_expert_gate": "renormalize"}, 1),
        (COPIES | ANCHORED | {"moe_ffn_experts_per_token": 1.5}, 1),
        (TOP_P | {"moe_constant_experts": 1, "moe_free_expert_tau": 0.5}, 1),
        (AOE | COPIES | ANCHORED, 1),
        ({"moe_input_jitter_eps": 0.01, "moe_importance_loss_coeff": 0.1}, 1),
        (SHARED, 1),
        (SHARED | {"moe_shared_expert_gate": True, "moe_shared_expert_overlap": True}, 1),
        (SHARED | TP | {"moe_shared_expert_intermediate_size": 192}, 2),
        (TOP_P | {"moe_top_p": 1.0, "moe_inference_max_experts": 4, "moe_inference_top_p": 0.1}, 1),
        (AOE_TOP_P, 1),
        (AOE_TOP_P | {"moe_top_p_target_experts": 1.5, "moe_top_p_integral_gain": 0.1}, 1),
        (RELU | {"moe_relu_target_experts": 0.5, "moe_input_jitter_eps": 0.01}, 1),
        (RELU | SHARED | {"moe_gate_low_rank_size": 8}, 1),
        (AOE_TOP_P | {"aoe_gradient": "selected_despite_aux"}, 1),
        (AOE | {"aoe_gradient": "selected"} | NO_LOSS, 1),
        (AOE | {"aoe_gradient": "selected_despite_aux", "aoe_gate": "all"}, 1),
        (AOE | {"moe_router_enable_expert_bias": True} | NO_LOSS, 1),
        (THRESHOLD | {"moe_threshold_ema": 0.0, "moe_threshold_target_experts": 3.9}, 1),
        (AOE_THRESHOLD | {"moe_threshold_update": "sign"}, 1),
        (ROUTING_FREE | {"aoe_gradient": "full", "routing_free_gate": "softmax"}, 1),
        (AOE_THRESHOLD | {"aoe_threshold_gate": "sigmoid", "aoe_gradient": "selected"}, 1),
        (EXPERT_CHOICE | {"expert_model_parallel_size": 4}, 4),
        (AOE_EXPERT_CHOICE | {"aoe_gradient": "selected"}, 1),
        (SEGMENTS, 1),
        (LORY, 1),
        (LORY | TP, 2),
        (LORY | {"lory_segment_length": 16, "lory_inference": "prompt"}, 1),
        (PREFIX | {"lory_first_segment": "uniform"}, 1),
        (UOE, 1),
        (UOE | TP | {"uoe_routing_neurons": 8, "uoe_norm_of": "gate"}, 2),
        (ERC | {"moe_erc_alpha": 0.0}, 1),
        (ERC | TOP_P, 1),
        (SMEAR, 1),
        (SMEAR | {"pipeline_model_parallel_size": 2}, 2),
    ],
)
def test_valid(options: dict[str, Any], world: int) -> None:
    validate(make_config(VALID | options), world)


def test_a_sequence_of_one_segment_has_nothing_after_the_first() -> None:
    assert make_config(VALID | LORY).first_part == 4
    assert make_config(VALID | LORY | {"lory_segment_length": 16}).first_part is None
    assert make_config(VALID | LORY | {"eval_first_part": 6}).first_part == 6
    assert make_config(VALID).first_part is None


@pytest.mark.parametrize("system", [LORY, PREFIX, SEGMENTS])
def test_a_single_segment_is_a_warning(system: dict[str, Any]) -> None:
    said = "are a single segment of --lory-segment-length 16"
    assert said in make_config(VALID | system | {"lory_segment_length": 16}).warnings[-1]
    assert said not in "".join(make_config(VALID | system | {"lory_segment_length": 15}).warnings)


#: Options that break a rule, by the error.
BROKEN: dict[str, dict[str, Any]] = {
    # routers
    "--moe-router-group-topk is not set: .* together": {"moe_router_num_groups": 2},
    "--moe-router-pre-softmax is true, but --moe-router-score-function is sigmoid": {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
    },
    "--moe-router-num-groups is not set: .* together": {"moe_router_group_topk": 2},
    "--moe-router-num-groups is 3, which does not divide --num-experts 4: choose a divisor": {
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 1,
    },
    "--moe-router-group-topk is 3, above --moe-router-num-groups 2: choose at most 2": {
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 3,
    },
    "--moe-router-topk is 2, but --moe-router-group-topk 1 .* leaves 1 experts .*: lower it": {
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 1,
    },
    "Eq. 5 .* width of -7: lower .*--moe-gate-low-rank-size": {"moe_gate_low_rank_size": 200},
    "--moe-gate-up-init-method is scaled, but W_g is whole: set --moe-gate-low-rank-size, .*": {
        "moe_gate_up_init_method": "scaled"
    },
    "--moe-router-bias-ema is 0.5, .*-update is sign: set it to": {"moe_router_bias_ema": 0.5},
    "-update is id, but there is no bias: set": {"moe_router_bias_update": "id"},
    "is quantile, but every token takes all 4 experts": QUANTILE | {"moe_router_topk": 4},
    "--moe-router-bias-update-rate is 0.5, but --moe-router-bias-update is quantile": QUANTILE
    | {"moe_router_bias_update_rate": 0.5},
    "is quantile, which does not support groups": QUANTILE
    | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "--moe-expert-capacity-factor is 1.5, but --moe-router-bias-update is .* later tokens": QUANTILE
    | {"moe_expert_capacity_factor": 1.5},
    "--moe-router-bias-frozen-share is 0.1, but there is no bias: set --moe-router-enable-ex": {
        "moe_router_bias_frozen_share": 0.1
    },
    "--moe-router-num-groups is 0": {"moe_router_num_groups": 0, "moe_router_group_topk": 1},
    "--moe-router-group-topk is 0": {"moe_router_num_groups": 2, "moe_router_group_topk": 0},
    "--moe-erc-alpha is 0.5, but there is no coupling loss: set": {"moe_erc_alpha": 0.5},
    "one matrix .*: leave out --moe-router-hidden-size": ERC | {"moe_router_hidden_size": 8},
    "one W_g .*: leave out --moe-gate-low-rank-size": ERC | {"moe_gate_low_rank_size": 8},
    "--moe-erc-loss-coeff is 1.0, which compares experts, and --num-experts is 1: raise it": ERC
    | {"num_experts": 1, "moe_router_topk": 1},
    # UoE
    "is 48 of the 48 neurons .* to select: choose fewer": UOE | {"uoe_routing_neurons": 48},
    "-neurons is 7, which leaves 41 of the 48 .* not a multiple of 2 .*: choose another": UOE
    | {"expert_tensor_parallel_size": 2, "uoe_routing_neurons": 7},
    "uoe does not start from dense layers: .*: leave out": UOE | {"moe_use_upcycling": True},
    "uoe does not start from dense layers: .*: leave": UOE | {"moe_dense_warmup_percent": 5},
    # top-p
    "--moe-top-p-target-experts is 5.0, above --num-experts 4: choose at most 4, or none": TOP_P
    | {"moe_top_p_target_experts": 5.0},
    "--moe-top-p-integral-gain is 0.1, but p is fixed: set --moe-top-p-target-experts": AOE_TOP_P
    | {"moe_top_p_integral_gain": 0.1},
    "--moe-top-p-proportional-gain is 0.1, but p is fixed": TOP_P
    | {"moe_top_p_proportional_gain": 0.1},
    "--moe-relu-target-experts is 4.5, above --num-experts 4: choose at most 4": RELU
    | {"moe_relu_target_experts": 4.5},
    "--moe-z-loss-coeff is 0.1, but .* relu has no softmax": RELU | {"moe_z_loss_coeff": 0.1},
    "--moe-expert-capacity-factor is 1.0, but with --expert-selection relu a token starts": RELU
    | {"moe_expert_capacity_factor": 1.0},
    "--moe-inference-max-experts is 5, above --num-experts 4: choose at most 4, or none": TOP_P
    | {"moe_inference_max_experts": 5},
    # thresholds
    "--moe-threshold-target-experts is 4.0, not below --num-experts 4, .* every token: l": THRESHOLD
    | {"moe_threshold_target_experts": 4.0},
    "--moe-threshold-ema is 0.5, but --moe-threshold-update is sign: set it to quantile,": THRESHOLD
    | {"moe_threshold_ema": 0.5, "moe_threshold_update": "sign"},
    "--moe-threshold-update-rate is 0.5, but --moe-threshold-update is quantile: set it": THRESHOLD
    | {"moe_threshold_update_rate": 0.5},
    "--moe-z-loss-coeff is 0.001, .* has no softmax": THRESHOLD | {"moe_z_loss_coeff": 1e-3},
    "--moe-expert-capacity-factor is 2.0, but .* depends on later tokens, .*: leave": AOE_THRESHOLD
    | {"moe_expert_capacity_factor": 2.0},
    "-gradient is selected, but probs that are a softmax over all norms": AOE_THRESHOLD
    | {"aoe_gradient": "selected"},
    # Routing-Free MoE
    "--routing-free-target-experts is 4.5, above --num-experts 4: choose at most 4": ROUTING_FREE
    | {"routing_free_target_experts": 4.5},
    "--routing-free-target-experts is 0.0": ROUTING_FREE | {"routing_free_target_experts": 0},
    "--moe-expert-capacity-factor is 2.0, but .* later tokens, .*: leave it out": ROUTING_FREE
    | {"moe_expert_capacity_factor": 2.0},
    # experts choose
    "--moe-expert-choice-capacity-factor is 4.5, above --num-experts 4: .* already": EXPERT_CHOICE
    | {"moe_expert_choice_capacity_factor": 4.5},
    "--lory-segment-length is 17, above --seq-length": SEGMENTS | {"lory_segment_length": 17},
    # autonomous
    "--aoe-gradient is selected, but --moe-aux-loss-coeff 0.01 .*: use full, or selected_desp": AOE
    | {"aoe_gradient": "selected"},
    "--aoe-gradient is selected, but --moe-importance-loss-coeff 0.1 ": AOE
    | NO_LOSS
    | {"aoe_gradient": "selected", "moe_importance_loss_coeff": 0.1},
    "--aoe-gradient is selected, but probs that are a softmax over all norms": AOE
    | NO_LOSS
    | {"aoe_gradient": "selected", "aoe_gate": "all"},
    "is selected, but probs that are a softmax over all norms": AOE_TOP_P
    | NO_LOSS
    | {"aoe_gradient": "selected", "moe_entropy_loss_coeff": 0.0},
    "but probs that are a softmax over all norms": AOE_EXPERT_CHOICE
    | {"aoe_gradient": "selected", "moe_expert_choice_scores": "softmax"},
    "--aoe-gather-w-down cuts W_down along --hidden-size 30, which --expert-tensor-parallel": AOE
    | {"aoe_gather_w_down": True, "aoe_wide_size": 8, "expert_tensor_parallel_size": 4}
    | {"hidden_size": 30, "num_attention_heads": 3, "num_query_groups": 3},
    # free experts
    "--moe-free-expert-tau is 0.5, but there are no free exper": {"moe_free_expert_tau": 0.5},
    "--moe-importance-loss-coeff is 0.1, which does not support free experts: leave it out,": COPIES
    | {"moe_importance_loss_coeff": 0.1},
    "--moe-erc-loss-coeff is 1.0, which does not support": COPIES | {"moe_erc_loss_coeff": 1},
    "--moe-router-num-groups is 2, which does not support free experts": COPIES
    | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "--moe-router-bias-update is sign, which would balance free experts .*: set it to error": COPIES
    | {"moe_router_enable_expert_bias": True},
    "--moe-ffn-experts-per-token is 1.0, but without a bias nothing holds it: set --moe-rou": COPIES
    | {"moe_ffn_experts_per_token": 1.0},
    "--moe-ffn-experts-per-token is 3.0, above --moe-router-topk 2: choose at most 2": COPIES
    | ANCHORED
    | {"moe_ffn_experts_per_token": 3},
    "--moe-zero-expert-gate is renormalize, but there are no zero experts: set --moe-zero-e": COPIES
    | {"moe_zero_expert_gate": "renormalize"},
    "--moe-zero-expert-gate is renormalize, but these .* are not divided .*: set it to keep": {
        "moe_router_topk": 1,
        "moe_zero_experts": 1,
        "moe_zero_expert_gate": "renormalize",
    },
    # shared experts
    "--moe-shared-expert-gate is true, but there is no shared expert: set --moe-shared-expert-": {
        "moe_shared_expert_gate": True
    },
    "--moe-shared-expert-overlap is true, but there is": {"moe_shared_expert_overlap": True},
    "--moe-shared-expert-intermediate-size is 193, more than the 192 of all 4 experts .*outn": {
        "moe_shared_expert_intermediate_size": 193
    },
    "--moe-shared-expert-intermediate-size is 47, which --tensor-model-parallel-size 2 does": TP
    | {"moe_shared_expert_intermediate_size": 47},
    "--eval-first-part is 16, .* --seq-length 16: choose at most 15": {"eval_first_part": 16},
    # merged
    "--lory-segment-length is 17, above --seq-length 16": LORY | {"lory_segment_length": 17},
    "--expert-model-parallel-size is 2, but merged experts .* raise --tensor-model-parallel-s": LORY
    | {"expert_model_parallel_size": 2},
    "--expert-tensor-parallel-size is 1, but merged experts .*: leave it out": LORY
    | TP
    | {"expert_tensor_parallel_size": 1},
    "--moe-expert-capacity-factor is 1.0, but no token is sent to merged experts: leave it": LORY
    | {"moe_expert_capacity_factor": 1.0},
    "--moe-activation-budget is 8.0, but merged experts receive no rows, .*: leave it out": SMEAR
    | {"moe_activation_budget": 8.0},
    "--expert-selection smear .*: use lory, or add": SMEAR | {"smear_sees_the_future": False},
}


#: With these options, values that are out of an option's range.
OUT_OF_RANGE = [
    (
        {},
        "moe_router_hidden_size=0 moe_gate_low_rank_size=0 moe_importance_loss_coeff=-1 "
        "moe_input_jitter_eps=-0.1 moe_input_jitter_eps=1 moe_router_bias_update_rate=0 "
        "moe_router_bias_ema=-0.1 moe_router_bias_ema=1 moe_router_bias_frozen_share=1.5 "
        "moe_erc_loss_coeff=-1 moe_copy_experts=-1 moe_zero_experts=-1 moe_constant_experts=-1 "
        "moe_shared_expert_intermediate_size=0 eval_first_part=0",
    ),
    (ERC, "moe_erc_alpha=-0.1 moe_erc_alpha=1.1"),
    (CORM, "corm_key_size=0 corm_reference_rate=0"),
    (UOE, "uoe_routing_neurons=0"),
    (COPIES, "moe_free_expert_tau=0 moe_free_expert_tau=2"),
    (COPIES | ANCHORED, "moe_ffn_experts_per_token=0"),
    (PREFIX, "lory_segment_length=0"),
    (SMEAR, "smear_expert_dropout=1 smear_expert_dropout=-0.1"),
    (
        TOP_P,
        "moe_top_p=0 moe_top_p=1.01 moe_top_p_target_experts=0.5 moe_entropy_loss_coeff=-1 "
        "moe_inference_top_p=0 moe_inference_top_p=2 moe_inference_max_experts=0",
    ),
    (
        TOP_P | {"moe_top_p_target_experts": 2},
        "moe_top_p_integral_gain=0 moe_top_p_proportional_gain=-1",
    ),
    (
        RELU,
        "moe_relu_target_experts=0 moe_relu_l1_coeff_init=0 moe_relu_l1_coeff_multiplier=1",
    ),
    (
        THRESHOLD,
        "moe_threshold_target_experts=0 moe_threshold_ema=1 moe_threshold_update_rate=0",
    ),
    (
        ROUTING_FREE,
        "routing_free_threshold=0 routing_free_expert_share=2 routing_free_coeff_init=2 "
        "routing_free_coeff_multiplier=1",
    ),
    (EXPERT_CHOICE, "moe_expert_choice_capacity_factor=0"),
]


@pytest.mark.parametrize("message", BROKEN)
def test_broken(message: str) -> None:
    refuse(BROKEN[message], message)


@pytest.mark.parametrize("system", [LORY, PREFIX, SMEAR, SEGMENTS])
def test_means_over_documents_are_refused(system: dict[str, Any]) -> None:
    refuse(system | OWN_DOCUMENTS, "--reset-attention-mask is true, but .* by the mean of")


@pytest.mark.parametrize(("options", "words"), OUT_OF_RANGE)
def test_out_of_range(options: dict[str, Any], words: str) -> None:
    for name, text in (word.split("=") for word in words.split()):
        flag, value = "--" + name.replace("_", "-"), float(text) if "." in text else int(text)
        refuse(options | {name: value}, f"^{flag} is {text}(.0)?: it must be (at|above|below) ")


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_dense_model_takes_no_system_but_the_default(name: str) -> None:
    config = make_config(VALID | {"num_experts": None, "expert_selection": name})
    if name == "topk":
        validate(config, 1)
    else:
        with pytest.raises(InputError, match=f"--expert-selection is '{name}', but .* is dense"):
            validate(config, 1)


def test_no_number_is_without_a_rule() -> None:
    """An option that is added later needs a bound too."""
    known = common_options()
    for options in selection_options().values():
        known = known | options
    numbers = {name for name, option in known.items() if option.kind in (int, float)}
    broken = [*BROKEN.values(), *test_validate.BROKEN.values()]
    broken += [options for options, _ in test_fp8.REFUSED.values()]
    ruled = {name for options in broken for name in options}
    ruled |= {*test_validate.AT_LEAST_0, *test_validate.AT_LEAST_1, *test_validate.ABOVE_0}
    ruled |= {word.split("=")[0] for _, words in OUT_OF_RANGE for word in words.split()}
    assert numbers - ruled - {"moe_dense_warmup_percent"} == set()  # tests/training/test_upcycling


def test_what_makes_a_loss_no_likelihood_is_said() -> None:
    def warnings(**options: Any) -> list[str]:
        return make_config(VALID | {"train_iters": 1000} | options).warnings

    assert warnings() == warnings(**AOE) == warnings(**TOP_P) == warnings(**THRESHOLD) == []
    assert warnings(**LORY, lory_first_segment="uniform") == []
    for options in (LORY, PREFIX, SMEAR, EXPERT_CHOICE, AOE_EXPERT_CHOICE, SEGMENTS):
        assert len(warnings(**options)) == 1
    (drops,) = warnings(moe_expert_capacity_factor=1.0)
    assert "where choices are dropped, losses are not the likelihood" in drops
    assert len(warnings(**EXPERT_CHOICE, moe_expert_capacity_factor=1.0)) == 2


def test_a_solved_bias_and_a_balancing_loss_are_told_to_work_against_each_other() -> None:
    solved = VALID | {
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update": "quantile",
        "train_iters": 2400,
    }
    assert make_config(solved | {"moe_aux_loss_coeff": 0.0}).warnings == []
    (told,) = make_config(solved | {"moe_aux_loss_coeff": 0.01}).warnings
    assert "--moe-aux-loss-coeff 0.01" in told and "set the coefficient to 0" in told
