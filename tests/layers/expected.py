"""What a layer of `tests.layers.single` computes, by the oracles: output, losses, slopes."""

import math
import zlib
from typing import Any

import numpy
import torch

from moe_parallel.config import Balancing, FixedChoices, RoutedSelection
from moe_parallel.systems import (
    AoESelection,
    AoEThresholdSelection,
    HashSelection,
    ReLUSelection,
    RoutingFreeSelection,
    TopKSelection,
    UoESelection,
)
from moe_parallel.systems.corm import CoRMSelection
from moe_parallel.systems.expert_choice import ExpertsChoose
from moe_parallel.systems.threshold import Cutoffs
from moe_parallel.systems.top_p import DynamicChoices
from tests.layers.single import (
    EXPERTS,
    INIT_STD,
    MOE_LAYERS,
    TOKEN_COUNTS,
    WIDTH,
    Arrays,
    Case,
    token_ids,
)
from tests.oracles import layers as oracle
from tests.oracles import losses, routing


def expected_scores(case: Case, given: Arrays) -> numpy.ndarray:
    x_TD = given["x"].reshape(-1, WIDTH)
    if isinstance(case.selection, UoESelection):
        return oracle.union_scores(x_TD, given["w_gate_up_ED2R"], case.selection.uoe_norm_of)
    if isinstance(case.selection, CoRMSelection):
        weights = given["w_key_RD"], given["w_query_ERD"]
        return oracle.contrastive_scores(x_TD, *weights, numpy.array(case.reference))
    if case.autonomous:
        norms = oracle.norm_scores(x_TD, given["w_down_EDR"]) - given.get("b_E", 0.0)
        unit = INIT_STD * numpy.sqrt(WIDTH * case.selection.aoe_low_rank_size)
        free = unit * given.get("w_free_Z", numpy.zeros(0))
        return numpy.hstack([norms, numpy.tile(free, (len(norms), 1))])
    if "w_router_ED" in given:
        return oracle.router_scores(x_TD, given["w_router_ED"])
    hidden = oracle.router_scores(x_TD, given["w_router_HD"])
    return oracle.router_scores(hidden, given["w_router_EH"])


def expected_choices(case: Case, scores: numpy.ndarray) -> oracle.Routing:
    """The experts that these scores select, before capacity."""
    s = case.selection
    if isinstance(s, DynamicChoices):
        p, most = (s.moe_top_p if case.setting is None else case.setting), None
        if not case.training:
            p, most = s.moe_inference_top_p or p, s.moe_inference_max_experts
        renormalizes = s.moe_top_p_renormalize
        return routing.top_p(
            scores, p, strict=s.moe_top_p_strict, most=most, renormalizes=renormalizes
        )
    if isinstance(s, ExpertsChoose):
        by_softmax = s.moe_expert_choice_scores == "softmax"
        factor = s.moe_expert_choice_capacity_factor
        if case.training:
            return routing.expert_choice(scores, factor, by_softmax=by_softmax)
        return routing.top_k(scores, round(factor), gate="all" if by_softmax else "scores")
    if isinstance(s, HashSelection):
        table = routing.fill_table(TOKEN_COUNTS, EXPERTS, s.moe_router_topk)
        rows = [table[item] for item in token_ids(scores[:, None])]
        return routing.by_table(scores, rows, raw_probability=s.moe_router_topk == 1)
    if isinstance(s, Cutoffs):
        gate = "sigmoid"
        if isinstance(s, AoEThresholdSelection):
            gate = "margin" if s.aoe_threshold_gate == "sigmoid" else "softmax"
        return routing.threshold(scores, -numpy.array(case.balance or (0.0,) * EXPERTS), gate)
    if isinstance(s, ReLUSelection):
        return routing.relu(scores)
    if isinstance(s, RoutingFreeSelection):
        assert s.routing_free_threshold is not None
        return routing.routing_free(scores, s.routing_free_threshold, s.routing_free_gate)
    assert isinstance(s, FixedChoices)
    return _beside_free(s, _fixed_choices(case, s, scores))


def _beside_free(s: FixedChoices, choices: oracle.Routing) -> oracle.Routing:
    if getattr(s, "moe_zero_expert_gate", "keep") == "keep":
        return choices
    return routing.without_zero_experts(choices, range(EXPERTS, EXPERTS + s.moe_zero_experts))


def _fixed_choices(case: Case, s: FixedChoices, scores: numpy.ndarray) -> oracle.Routing:
    k = s.moe_router_topk
    if s.moe_router_force_routing is not None:
        assert (k, s.moe_router_force_routing) == (1, "hot:1")
        return routing.one_expert(scores)
    if s.moe_router_force_load_balancing:
        return routing.in_turn(scores, k, raw_probability=k == 1 and not case.autonomous)
    if isinstance(s, AoESelection):
        gate = "all" if s.aoe_gate == "all" else "selected"
        return routing.top_k(scores, k, gate=gate, bias=case.balance)
    if isinstance(s, UoESelection):
        return routing.top_k(scores, k, bias=case.balance)
    if isinstance(s, CoRMSelection):
        return routing.top_k(scores, k, gate="all" if k == 1 else "selected")
    assert isinstance(s, TopKSelection)
    groups = None
    if s.moe_router_num_groups is not None:
        groups = (s.moe_router_num_groups, s.moe_router_group_topk)
    return routing.top_k(
        scores,
        k,
        gate="all" if k == 1 or s.moe_router_pre_softmax else "selected",
        score_function=s.moe_router_score_function,
        rank_by="probabilities",
        bias=case.balance,
        groups=groups,
    )


def expected_routing(case: Case, given: Arrays) -> tuple[oracle.Routing, oracle.Routing]:
    """The routing of the oracle: all choices, and those within capacity."""
    return _routing(case, expected_scores(case, given))


def _routing(case: Case, scores: numpy.ndarray) -> tuple[oracle.Routing, oracle.Routing]:
    choices = expected_choices(case, scores)
    if case.capacity_factor is None:
        return choices, choices
    limit = oracle.capacity(len(scores), case.counted_k, EXPERTS, case.capacity_factor)
    if not case.free:
        return choices, oracle.drop(choices, limit, case.policy)
    tau = case.selection.moe_free_expert_tau
    each = len(scores) * case.counted_k * case.capacity_factor / (tau * EXPERTS + case.free)
    limits = [math.ceil(tau * each)] * EXPERTS + [math.ceil(each)] * case.free
    return choices, oracle.drop(choices, limits, case.policy)


def expected_output(case: Case, given: Arrays) -> numpy.ndarray:
    return _output(case, given, *expected_routing(case, given))


def _output(
    case: Case, given: Arrays, choices: oracle.Routing, kept: oracle.Routing
) -> numpy.ndarray:
    x_TD = given["x"].reshape(-1, WIDTH)
    y_TD = oracle.combine(x_TD, kept, [*_experts(given), *_free_experts(case, given)])
    if isinstance(case.selection, UoESelection):
        weights = given["w_gate_up_ED2R"], given["w_out_ERD"]
        gated = case.selection.uoe_gate_routing
        y_TD = y_TD + oracle.union_output(x_TD, *weights, choices, gated)
    if case.selection.moe_shared_expert_intermediate_size is not None:
        y_TD = y_TD + numpy.array([_shared(given, x_D) for x_D in x_TD])
    return y_TD.reshape(given["x"].shape)


def _experts(given: Arrays) -> list[Any]:
    if "w_down_EDR" in given:
        matrices = zip(
            given["w_down_EDR"],
            given["experts.w_up_LRW"],
            given["experts.w_p_LDW"],
            given["experts.w_out_LWD"],
            strict=True,
        )
        return [lambda x, m=m: oracle.autonomous_expert(x, *m) for m in matrices]
    gate_up, out = given["experts.w_gate_up_LD2F"], given["experts.w_out_LFD"]
    return [
        lambda x, e=e: oracle.swiglu_expert(x, gate_up[e, :, 0], gate_up[e, :, 1], out[e])
        for e in range(EXPERTS)
    ]


def _free_experts(case: Case, given: Arrays) -> list[Any]:
    if not case.free:
        return []
    zeros = [numpy.zeros_like] * case.selection.moe_zero_experts
    copies = [lambda x: x] * case.selection.moe_copy_experts
    if "v_CD" not in given:
        return [*zeros, *copies]
    matrices = zip(given["w_constant_CAD"], given["v_CD"], strict=True)
    constants = [lambda x, m=m: oracle.constant_expert(x, *m) for m in matrices]
    return [*zeros, *copies, *constants]


def _shared(given: Arrays, x_D: numpy.ndarray) -> numpy.ndarray:
    w_gate, w_up = numpy.split(given["shared.dense.linear_fc1.weight"], 2)
    y_D = oracle.swiglu_expert(x_D, w_gate.T, w_up.T, given["shared.dense.linear_fc2.weight"].T)
    if "shared.w_gate_1D" in given:
        y_D = routing.sigmoid(given["shared.w_gate_1D"][0] @ x_D) * y_D
    return y_D


def expected_losses(case: Case, choices: oracle.Routing) -> float:
    """The sum of the auxiliary losses, each with its coefficient."""
    s = case.selection
    total = 0.0
    if isinstance(s, Balancing):
        coefficient = s.moe_aux_loss_coeff
        if getattr(s, "moe_aux_loss_per_choice", False):
            coefficient /= MOE_LAYERS * s.moe_router_topk
        kind = s.moe_router_load_balancing_type
        weights = [1.0] * EXPERTS + [getattr(s, "moe_free_expert_tau", 1.0)] * case.free
        if kind == "seq_aux_loss":
            total += coefficient * losses.sequence_load_balancing(choices, case.sequences, weights)
        else:
            load = case.load if kind == "global_aux_loss" else None
            total += coefficient * losses.load_balancing(choices, load, weights)
        total += s.moe_importance_loss_coeff * losses.importance(choices)
    if isinstance(s, RoutedSelection):
        total += s.moe_z_loss_coeff * losses.z(choices.scores)
    if isinstance(s, DynamicChoices):
        total += s.moe_entropy_loss_coeff * losses.entropy(choices)
    if isinstance(s, ReLUSelection):
        assert case.setting is not None
        total += case.setting / MOE_LAYERS * losses.l1(choices, s.moe_relu_target_experts)
    if isinstance(s, RoutingFreeSelection):
        assert case.setting is not None
        share = s.routing_free_expert_share
        total += case.setting / MOE_LAYERS * losses.routing_free(choices, share)
    return total


def expected_coupling(case: Case, moved: Arrays, given: Arrays) -> float:
    """The coupling loss with its coefficient; its noise is that of the weights `given`."""
    s = case.selection
    if not isinstance(s, RoutedSelection) or not s.moe_erc_loss_coeff:
        return 0.0
    noise = torch.Generator().manual_seed(zlib.crc32(b"0 0 1"))  # seed, iteration, layer
    uniform = torch.rand(EXPERTS, WIDTH, generator=noise).numpy()
    bounds = numpy.array(losses.noise_bound(given["w_router_ED"]))[:, None]
    rows = moved["w_router_ED"] * (1 + bounds * (2 * uniform - 1))
    norms = losses.coupling_norms(rows, moved["experts.w_gate_up_LD2F"][:, :, 0])
    return s.moe_erc_loss_coeff * losses.coupling(norms, s.moe_erc_alpha)


def expected_slopes(
    case: Case, given: Arrays, direction: numpy.ndarray, fixed: numpy.ndarray | None = None
) -> Arrays:
    """What `slopes` gives of the gradients of every weight and the input, by the oracle.

    Args:
        fixed: bool [T, E]; where it is True, the score is a constant.
    """
    constant = expected_scores(case, given)

    def objective(moved: Arrays) -> float:
        scores = expected_scores(case, moved)
        if fixed is not None:
            scores = numpy.where(fixed, constant, scores)
        choices, kept = _routing(case, scores)
        total = float((_output(case, moved, choices, kept) * direction).sum())
        if case.training:
            total += expected_losses(case, choices) + expected_coupling(case, moved, given)
        return total

    return oracle.numeric_slopes(objective, given)


def unchosen(choices: oracle.Routing) -> numpy.ndarray:
    """bool [T, E]: the experts that a token did not choose."""
    return numpy.array([[e not in row for e in range(EXPERTS)] for row in choices.experts])
