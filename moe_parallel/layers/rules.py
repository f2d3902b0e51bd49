"""The rule of each system in training and in evaluation, made once from its configuration."""

from __future__ import annotations

import math

import torch

from moe_parallel.balancing.load import ExpertBias
from moe_parallel.config import (
    AoESelection,
    BiasBalancing,
    Config,
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
    SegmentExpertChoiceSelection,
    TopKSelection,
)
from moe_parallel.selection import topk
from moe_parallel.selection.capacity import DROP_ORDERS, Capacity
from moe_parallel.selection.choices import Rule
from moe_parallel.selection.expert_choice import ExpertChoice, raw
from moe_parallel.selection.segments import BySegment
from moe_parallel.selection.top_p import TopP
from moe_parallel.selection.topk import GroupLimit, InTurn, TopK


def build_bias(selection: DispatchedSelection, num_experts: int) -> ExpertBias | None:
    """The bias that balances the load; None: the system has none."""
    if isinstance(selection, BiasBalancing) and selection.moe_router_enable_expert_bias:
        return ExpertBias(num_experts, selection.moe_router_bias_update_rate)
    return None


def build_capacity(config: Config) -> Capacity | None:
    """The capacity rule of a configuration; None: dropless."""
    moe = config.moe
    if moe.moe_expert_capacity_factor is None:
        return None
    return Capacity(
        moe.moe_expert_capacity_factor,
        DROP_ORDERS[moe.moe_token_drop_policy],
        moe.moe_pad_expert_input_to_capacity,
        config.selection.choices_per_token or 1 if moe.moe_capacity_counts_topk else 1,
    )


def build_rules(selection: DispatchedSelection, bias: ExpertBias | None) -> tuple[Rule, Rule]:
    """How scores become choices in training, and how in evaluations."""
    if isinstance(selection, DynamicChoices):
        return _top_p(selection)
    if isinstance(selection, ExpertsChoose):
        return _expert_choice(selection)
    assert isinstance(selection, FixedChoices)
    rule = _topk(selection, None if bias is None else bias.bias_E)
    if selection.moe_router_force_load_balancing:
        return InTurn(rule), InTurn(rule)
    return rule, rule


def _topk(selection: FixedChoices, bias_E: torch.Tensor | None) -> TopK:
    if isinstance(selection, TopKSelection):
        return _routed_topk(selection, bias_E)
    assert isinstance(selection, AoESelection)
    over_all = selection.aoe_gate == "all"
    gate = topk.raw_probability if over_all else topk.softmax_of_selected
    return TopK(selection.moe_router_topk, gate, bias_E=bias_E)


def _routed_topk(selection: TopKSelection, bias_E: torch.Tensor | None) -> TopK:
    k = selection.moe_router_topk
    groups = None
    if selection.moe_router_num_groups is not None:
        assert selection.moe_router_group_topk is not None
        groups = GroupLimit(selection.moe_router_num_groups, selection.moe_router_group_topk)
    if selection.moe_router_score_function == "sigmoid":
        gate = topk.sigmoid_of_selected if k == 1 else topk.sigmoid_share_of_selected
        return TopK(k, gate, topk.sigmoid_shares, torch.sigmoid, bias_E, groups)
    gate = topk.raw_probability if k == 1 else topk.softmax_of_selected
    # Logits rank as their softmax does; only a bias and sums over groups need the probabilities.
    ranking = None if bias_E is None and groups is None else topk.softmax
    return TopK(k, gate, topk.softmax, ranking, bias_E, groups)


def _top_p(selection: DynamicChoices) -> tuple[Rule, Rule]:
    strict = selection.moe_top_p_strict
    p = selection.moe_inference_top_p or selection.moe_top_p
    evaluation = TopP(p, strict, selection.moe_inference_max_experts)
    return TopP(selection.moe_top_p, strict), evaluation


def _expert_choice(selection: ExpertsChoose) -> tuple[Rule, Rule]:
    factor = selection.moe_expert_choice_capacity_factor
    by_probability = selection.moe_expert_choice_scores == "softmax"
    ranking = topk.softmax if by_probability else raw
    gate = topk.raw_probability if by_probability else topk.raw_score
    # As many experts for each token as the experts took on average, half upwards as they round.
    rules = ExpertChoice(factor, ranking), TopK(max(1, math.floor(factor + 0.5)), gate)
    if isinstance(selection, SegmentExpertChoiceSelection):
        training, evaluation = rules
        length = selection.lory_segment_length
        return BySegment(training, length), BySegment(evaluation, length)
    return rules
