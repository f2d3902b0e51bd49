"""Every system that dispatches tokens, with each of its options, as small layers."""

from typing import Any

import numpy

from moe_parallel.systems import (
    AoEExpertChoiceSelection,
    AoESelection,
    AoEThresholdSelection,
    AoETopPSelection,
    ExpertChoiceSelection,
    HashSelection,
    ReLUSelection,
    RoutingFreeSelection,
    ThresholdSelection,
    TopKSelection,
    TopPSelection,
    UoESelection,
)
from moe_parallel.systems.corm import CoRMSelection
from tests.layers.single import EXPERTS, WIDTH, Case


def topk(k: int = 2, aux: float = 0.3, z: float = 0.1, **options: Any) -> TopKSelection:
    return TopKSelection(moe_router_topk=k, moe_aux_loss_coeff=aux, moe_z_loss_coeff=z, **options)


def hashed(k: int = 2) -> HashSelection:
    return HashSelection(moe_router_topk=k, moe_z_loss_coeff=0.1)


def top_p(p: float = 0.6, **options: Any) -> TopPSelection:
    losses = {"moe_aux_loss_coeff": 0.3, "moe_entropy_loss_coeff": 0.2, "moe_z_loss_coeff": 0.1}
    return TopPSelection(moe_top_p=p, **losses | options)


def relu(**options: Any) -> ReLUSelection:
    return ReLUSelection(moe_relu_target_experts=1.5, **options)


def expert_choice(scores: str = "raw", **options: Any) -> ExpertChoiceSelection:
    return ExpertChoiceSelection(moe_expert_choice_scores=scores, moe_z_loss_coeff=0.1, **options)


def aoe(k: int = 2, aux: float = 0.3, **options: Any) -> AoESelection:
    return AoESelection(moe_router_topk=k, moe_aux_loss_coeff=aux, aoe_low_rank_size=2, **options)


def aoe_top_p(p: float = 0.6, **options: Any) -> AoETopPSelection:
    losses = {"moe_aux_loss_coeff": 0.3, "moe_entropy_loss_coeff": 0.2}
    return AoETopPSelection(moe_top_p=p, aoe_low_rank_size=2, **losses | options)


def aoe_expert_choice(scores: str = "raw", **options: Any) -> AoEExpertChoiceSelection:
    return AoEExpertChoiceSelection(moe_expert_choice_scores=scores, aoe_low_rank_size=2, **options)


def uoe(k: int = 2, aux: float = 0.3, **options: Any) -> UoESelection:
    return UoESelection(moe_router_topk=k, moe_aux_loss_coeff=aux, **options)


def corm(k: int = 2, aux: float = 0.3, **options: Any) -> CoRMSelection:
    return CoRMSelection(moe_router_topk=k, moe_aux_loss_coeff=aux, corm_key_size=3, **options)


def threshold(**options: Any) -> ThresholdSelection:
    return ThresholdSelection(**options)


def aoe_threshold(gate: str = "softmax", **options: Any) -> AoEThresholdSelection:
    return AoEThresholdSelection(aoe_threshold_gate=gate, aoe_low_rank_size=2, **options)


def routing_free(theta: float = 3.0, gate: str = "norm", **options: Any) -> RoutingFreeSelection:
    return RoutingFreeSelection(
        routing_free_threshold=theta, routing_free_gate=gate, aoe_low_rank_size=2, **options
    )


IDLE = (-8.0, 0.0, 0.0, 0.0)  # no token chooses the first expert
BUSY = (0.0, 0.0, 2.5, 0.0)  # every token chooses the third expert
SKEWED = (0.5, 0.0, -0.5, 0.2)
BALANCE = (0.2, -0.1, 0.05, -0.3)
LOAD = (0.9, 0.1, 0.6, 0.4)
REFERENCE = (0.7, -0.3, 1.1, 0.4, -0.9)
#: Minus the cutoffs of logits, and of norms; fp32 has these numbers.
CUTOFFS = (0.25, -0.125, 0.0, -0.5)
OF_NORMS = (-3.25, -2.5, -2.75, -4.0)

SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss"}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss"}
IMPORTANCE = {"moe_importance_loss_coeff": 0.4}
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIASED = {"moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
SHARED = {"moe_shared_expert_intermediate_size": 2}
ONE_OF_EACH = {"moe_zero_experts": 1, "moe_copy_experts": 1, "moe_constant_experts": 1}
ZEROS = {"moe_zero_experts": 3, "moe_zero_expert_gate": "renormalize"}
COPIES = {"moe_copy_experts": 2}
ANCHORED = {"moe_router_enable_expert_bias": True, "moe_router_bias_update": "error"}
COUPLED = {"moe_erc_loss_coeff": 0.7, "moe_erc_alpha": 0.5}
IN_TURN = {"moe_router_force_load_balancing": True}
ONE_EXPERT = {"moe_router_force_routing": "hot:1"}
SELECTED = {"aoe_gradient": "selected"}
DESPITE = {"aoe_gradient": "selected_despite_aux"}

CASES = {
    "topk": Case(topk()),
    "topk, two sequences": Case(topk(), sequences=2, tokens=6),
    "topk, aux loss per choice": Case(topk(z=0.0, moe_aux_loss_per_choice=True)),
    "topk, aux loss of sequences": Case(topk(**SEQUENCE), sequences=2, tokens=6),
    "topk, aux loss of the step before": Case(topk(**GLOBAL), load=LOAD),
    "topk, importance loss": Case(topk(aux=0.0, **IMPORTANCE)),
    "topk, all experts": Case(topk(k=EXPERTS)),
    "topk, an idle expert": Case(topk(), bias=IDLE),
    "topk, not renormalized": Case(topk(moe_router_pre_softmax=True)),
    "topk, drop by probability": Case(topk(), capacity_factor=0.6, policy="probs"),
    "topk, drop by position": Case(topk(), capacity_factor=0.6, policy="position"),
    "topk, drop and pad": Case(topk(), capacity_factor=0.6, policy="probs", pad=True),
    "topk, balanced by bias": Case(topk(**BIASED), balance=BALANCE),
    "topk, groups": Case(topk(**GROUPS)),
    "topk, groups and bias": Case(topk(**GROUPS, **BIASED), balance=BALANCE, bias=SKEWED),
    "topk, in turn": Case(topk(**IN_TURN)),
    "top1, forced to one expert": Case(topk(k=1, **ONE_EXPERT)),
    "topk, factorized": Case(topk(moe_gate_low_rank_size=2)),
    "topk, large router, factorized": Case(
        topk(moe_router_hidden_size=3, moe_gate_low_rank_size=2)
    ),
    "topk, coupling": Case(topk(**COUPLED)),
    "topk, coupling alone": Case(topk(aux=0.0, z=0.0, moe_erc_loss_coeff=0.7)),
    "topk, evaluated": Case(topk(**BIASED), balance=BALANCE, training=False),
    "top1": Case(topk(k=1)),
    "top1, all to one expert": Case(topk(k=1), bias=BUSY),
    "top1, drop and pad": Case(topk(k=1), capacity_factor=0.5, bias=BUSY, pad=True),
    "sigmoid": Case(topk(**SIGMOID)),
    "sigmoid, top1": Case(topk(k=1, **SIGMOID)),
    "sigmoid, groups and bias": Case(
        topk(**SIGMOID, **GROUPS, **BIASED), balance=BALANCE, bias=SKEWED
    ),
    "sigmoid, aux loss of sequences": Case(
        topk(**SIGMOID, **SEQUENCE, **IMPORTANCE), sequences=2, tokens=6
    ),
    "topk, free experts": Case(topk(**ONE_OF_EACH)),
    "topk, constant experts": Case(topk(moe_constant_experts=2, moe_router_hidden_size=3)),
    "topk, free experts, aux loss of sequences": Case(
        topk(moe_free_expert_tau=0.25, **ONE_OF_EACH, **SEQUENCE), sequences=2, tokens=6
    ),
    "topk, free experts, drop and pad": Case(topk(**ONE_OF_EACH), capacity_factor=0.6, pad=True),
    "topk, zero experts, the others renormalized": Case(topk(**ZEROS)),
    "topk, free experts, renormalized beside zero experts": Case(
        topk(moe_zero_expert_gate="renormalize", **ONE_OF_EACH)
    ),
    "topk, copies, balanced by bias": Case(
        topk(**COPIES, **ANCHORED), balance=(*BALANCE, 0.0, 0.0)
    ),
    "top_p": Case(top_p()),
    "top_p, aux loss of the micro-batch": Case(
        top_p(moe_router_load_balancing_type="aux_loss"), sequences=2, tokens=6
    ),
    "top_p, coupling": Case(top_p(**COUPLED)),
    "top_p, strict": Case(top_p(moe_top_p_strict=True), bias=SKEWED),
    "top_p, all experts": Case(top_p(p=1.0)),
    "top_p, drop and pad": Case(top_p(), capacity_factor=1.2, pad=True),
    "top_p, evaluated with limits": Case(
        top_p(p=1.0, moe_inference_top_p=0.9, moe_inference_max_experts=2), training=False
    ),
    "top_p, free experts": Case(top_p(**ONE_OF_EACH)),
    "hash": Case(hashed()),
    "hash, two sequences": Case(hashed(), sequences=2, tokens=6),
    "hash, one expert": Case(hashed(k=1)),
    "hash, drop by position": Case(hashed(), capacity_factor=0.6, policy="position"),
    "hash, evaluated": Case(hashed(), training=False),
    "top_p, renormalized": Case(top_p(moe_top_p_renormalize=True)),
    "top_p, renormalized, evaluated with limits": Case(
        top_p(p=0.9, moe_top_p_renormalize=True, moe_inference_max_experts=2), training=False
    ),
    "top_p, a moving p": Case(top_p(p=0.9, moe_top_p_target_experts=2.0), setting=0.5),
    "top_p, a moving p, evaluated": Case(
        top_p(p=0.9, moe_top_p_target_experts=2.0), setting=0.5, training=False
    ),
    "top_p, a moving p, evaluated with another": Case(
        top_p(moe_top_p_target_experts=2.0, moe_inference_top_p=0.9), setting=0.3, training=False
    ),
    "relu": Case(relu(), setting=0.3),
    "relu, busy and idle experts": Case(relu(), setting=0.3, bias=(-8.0, 8.0, 0.0, 0.0)),
    "relu, no expert at all": Case(relu(), setting=0.3, bias=(-8.0,) * EXPERTS),
    "relu, evaluated": Case(relu(), setting=0.3, training=False),
    "expert_choice, raw": Case(expert_choice()),
    "expert_choice, softmax": Case(expert_choice("softmax"), bias=SKEWED),
    "expert_choice, all tokens": Case(
        expert_choice(moe_expert_choice_capacity_factor=float(EXPERTS))
    ),
    "expert_choice, drop": Case(expert_choice("softmax"), capacity_factor=1.1),
    "expert_choice, raw, evaluated": Case(expert_choice(), training=False),
    "expert_choice, softmax, evaluated": Case(expert_choice("softmax"), training=False),
    "aoe": Case(aoe()),
    "aoe, two sequences": Case(aoe(), sequences=2, tokens=6),
    "aoe, all experts": Case(aoe(k=EXPERTS)),
    "aoe, one expert": Case(aoe(k=1)),
    "aoe, forced to one expert": Case(aoe(k=1, aoe_gate="all", **ONE_EXPERT)),
    "aoe, all to one expert": Case(aoe(k=1), bias=BUSY),
    "aoe, an idle expert": Case(aoe(), bias=IDLE),
    "aoe, aux loss of sequences": Case(aoe(**SEQUENCE), sequences=2, tokens=6),
    "aoe, aux loss of the step before": Case(aoe(**GLOBAL), load=LOAD),
    "aoe, importance loss": Case(aoe(aux=0.0, **IMPORTANCE)),
    "aoe, drop by probability": Case(aoe(), capacity_factor=0.6, policy="probs"),
    "aoe, drop by position": Case(aoe(), capacity_factor=0.6, policy="position"),
    "aoe, drop and pad": Case(aoe(), capacity_factor=0.6, policy="position", pad=True),
    "aoe, scores kept": Case(aoe(aoe_recompute_scores=False)),
    "aoe, gate kept": Case(aoe(aoe_recompute_gate=False)),
    "aoe, gate over all": Case(aoe(aoe_gate="all")),
    "aoe, balanced by bias": Case(aoe(**BIASED), balance=BALANCE),
    "aoe, in turn": Case(aoe(**IN_TURN)),
    "aoe, selected gradient": Case(aoe(aux=0.0, **SELECTED)),
    "aoe, selected gradient, drop": Case(aoe(aux=0.0, **SELECTED), capacity_factor=0.6),
    "aoe, selected gradient and bias": Case(aoe(aux=0.0, **SELECTED, **BIASED), balance=BALANCE),
    "aoe, selected gradient despite aux": Case(aoe(**DESPITE)),
    "aoe, selected gradient, gate over all": Case(aoe(aoe_gate="all", **DESPITE)),
    "aoe, copies": Case(aoe(**COPIES)),
    "aoe, zero experts, the others renormalized": Case(aoe(**ZEROS)),
    "aoe, copies, selected gradient and bias": Case(
        aoe(aux=0.0, **COPIES, **SELECTED, **ANCHORED), balance=(*BALANCE, 0.0, 0.0)
    ),
    "aoe, copies, scores kept, drop": Case(
        aoe(aoe_recompute_scores=False, **COPIES), capacity_factor=0.6
    ),
    "aoe_top_p": Case(aoe_top_p()),
    "aoe_top_p, strict, aux loss of sequences": Case(
        aoe_top_p(moe_top_p_strict=True, **SEQUENCE), sequences=2, tokens=6
    ),
    "aoe_top_p, all experts": Case(aoe_top_p(p=1.0)),
    "aoe_top_p, a moving p, renormalized": Case(
        aoe_top_p(moe_top_p_target_experts=2.0, moe_top_p_renormalize=True), setting=0.5
    ),
    "aoe_top_p, drop and pad": Case(aoe_top_p(p=0.8), capacity_factor=1.2, pad=True),
    "aoe_top_p, selected gradient despite aux": Case(aoe_top_p(**DESPITE)),
    "aoe_top_p, evaluated with limits": Case(
        aoe_top_p(p=1.0, moe_inference_max_experts=2), training=False
    ),
    "aoe_expert_choice, raw": Case(aoe_expert_choice()),
    "aoe_expert_choice, softmax": Case(aoe_expert_choice("softmax")),
    "aoe_expert_choice, drop and pad": Case(aoe_expert_choice(), capacity_factor=1.1, pad=True),
    "aoe_expert_choice, selected gradient": Case(aoe_expert_choice(**SELECTED)),
    "aoe_expert_choice, selected gradient despite softmax": Case(
        aoe_expert_choice("softmax", **DESPITE)
    ),
    "aoe_expert_choice, evaluated": Case(aoe_expert_choice(), training=False),
    "uoe": Case(uoe()),
    "uoe, all experts": Case(uoe(k=EXPERTS)),
    "uoe, an idle expert": Case(uoe(), bias=IDLE),
    "uoe, two routing neurons": Case(uoe(uoe_routing_neurons=2)),
    "uoe, norm of silu": Case(uoe(uoe_routing_neurons=2, uoe_norm_of="silu")),
    "uoe, norm of the gate": Case(uoe(uoe_routing_neurons=2, uoe_norm_of="gate")),
    "uoe, gated routing": Case(uoe(uoe_gate_routing=True)),
    "uoe, gated routing, drop": Case(uoe(uoe_gate_routing=True), capacity_factor=0.6),
    "uoe, balanced by bias": Case(uoe(**BIASED), balance=BALANCE),
    "uoe, in turn": Case(uoe(**IN_TURN)),
    "corm": Case(corm(), reference=REFERENCE),
    "corm, before the first update": Case(corm()),
    "corm, two sequences": Case(corm(**SEQUENCE), reference=REFERENCE, sequences=2, tokens=6),
    "corm, one expert": Case(corm(k=1), reference=REFERENCE),
    "corm, importance loss": Case(corm(aux=0.0, **IMPORTANCE), reference=REFERENCE),
    "corm, drop by probability": Case(corm(), reference=REFERENCE, capacity_factor=0.6),
    "corm, in turn": Case(corm(**IN_TURN), reference=REFERENCE),
    "corm, evaluated": Case(corm(), reference=REFERENCE, training=False),
    "threshold": Case(threshold(), balance=CUTOFFS),
    "threshold, evaluated": Case(threshold(), balance=CUTOFFS, training=False),
    "threshold, no expert": Case(threshold(), balance=(-99.0,) * EXPERTS),
    "threshold, large router, factorized": Case(
        threshold(moe_router_hidden_size=3, moe_gate_low_rank_size=2), balance=CUTOFFS
    ),
    "aoe_threshold": Case(aoe_threshold(), balance=OF_NORMS),
    "aoe_threshold, gate of the margin": Case(aoe_threshold("sigmoid"), balance=OF_NORMS),
    "aoe_threshold, selected gradient": Case(
        aoe_threshold("sigmoid", **SELECTED), balance=OF_NORMS
    ),
    "routing_free": Case(routing_free(), setting=0.3),
    "routing_free, full gradient": Case(
        routing_free(aoe_gradient="full", routing_free_expert_share=0.25), setting=0.3
    ),
    "routing_free, softmax of the chosen": Case(routing_free(gate="softmax"), setting=0.3),
    "routing_free, no expert": Case(routing_free(theta=99.0, gate="softmax"), setting=0.3),
    "routing_free, evaluated": Case(routing_free(), training=False),
    "aoe_threshold, evaluated": Case(aoe_threshold(), balance=OF_NORMS, training=False),
}

GATED = SHARED | {"moe_shared_expert_gate": True}

# Megatron-Core's dense layer needs torch.distributed to be initialized.
SHARED_CASES = {
    "topk": Case(topk(**SHARED)),
    "topk, gated": Case(topk(**GATED), sequences=2, tokens=6),
    "topk, gated, drop": Case(topk(**GATED), capacity_factor=0.6),
    "topk, evaluated": Case(topk(**GATED), training=False),
    "top_p": Case(top_p(**SHARED)),
    "relu": Case(relu(**SHARED), setting=0.3),
    "expert_choice, gated": Case(expert_choice(**GATED)),
    "aoe, gated": Case(aoe(**GATED)),
    "aoe_top_p": Case(aoe_top_p(**SHARED)),
    "uoe": Case(uoe(**SHARED)),
    "corm": Case(corm(**SHARED), reference=REFERENCE),
}


def direction(case: Case) -> numpy.ndarray:
    """The weights of the outputs in the scalar that is differentiated."""
    shape = (case.tokens // case.sequences, case.sequences, WIDTH)
    return numpy.random.default_rng(1).normal(size=shape)


def close(found: numpy.ndarray, wanted: numpy.ndarray, tolerance: float, name: str) -> None:
    """Equal up to `tolerance` times the largest value."""
    assert found.shape == wanted.shape, name
    error = abs(found - wanted).max()
    limit = tolerance * max(abs(wanted).max(), 1e-3)
    assert error <= limit, f"{name} is off by {error:.2e}, more than {limit:.2e}"
