"""topk: a linear router selects the K most probable experts (Shazeer 2017; Switch for K = 1)."""

from __future__ import annotations

import torch

from moe_parallel.config import FixedChoices, TopKChoices
from moe_parallel.layers import RoutedLayer, Rules, System, register
from moe_parallel.layers.system import FREE_OUTPUT, SCALED_OUTPUT
from moe_parallel.selection.rules import (
    GroupLimit,
    ProbsOf,
    WithoutZeroExperts,
    raw_probability,
    sigmoid_of_selected,
    sigmoid_share_of_selected,
    sigmoid_shares,
    softmax,
    softmax_of_selected,
)
from moe_parallel.selection.topk import RoundRobin, TopK
from moe_parallel.systems.topk import TopKSelection


def rules(selection: TopKSelection) -> Rules:
    return same_rules(selection, _rule(selection))


def same_rules(selection: FixedChoices, rule: TopK) -> Rules:
    """`rule` in training and in evaluation, unless the options force a balanced load."""
    used = RoundRobin(rule) if selection.moe_router_force_load_balancing else rule
    return Rules(used, used)


def _rule(selection: TopKSelection) -> TopK:
    k = selection.moe_router_topk
    groups = None
    if selection.moe_router_num_groups is not None:
        assert selection.moe_router_group_topk is not None
        groups = GroupLimit(selection.moe_router_num_groups, selection.moe_router_group_topk)
    if selection.moe_router_score_function == "sigmoid":
        share = sigmoid_of_selected if k == 1 else sigmoid_share_of_selected
        probs = beside_free(selection, share)
        return TopK(k, probs, sigmoid_shares, torch.sigmoid, groups=groups)
    whole = k == 1 or selection.moe_router_pre_softmax
    share = raw_probability if whole else softmax_of_selected
    probs = beside_free(selection, share)
    return TopK(k, probs, softmax, softmax, groups=groups)


def beside_free(selection: TopKChoices, probs: ProbsOf) -> ProbsOf:
    """`probs` as --moe-zero-expert-gate asks."""
    if selection.moe_zero_expert_gate == "keep":
        return probs
    return WithoutZeroExperts(probs, selection.free_experts, selection.moe_zero_experts)


def upcycling(selection: TopKSelection) -> str | None:
    """With K = 1, the prob is the probability of the chosen expert, which is below 1."""
    if selection.free_experts:
        return FREE_OUTPUT
    return None if selection.renormalizes else SCALED_OUTPUT


TOPK = register(
    System(
        TopKSelection,
        layer=RoutedLayer,
        rules=rules,
        upcycling=upcycling,
    )
)
