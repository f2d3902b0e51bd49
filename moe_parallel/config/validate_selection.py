"""The rules of each expert-selection system, by the sets of options that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_parallel.config.config import Config
from moe_parallel.config.selection import (
    AoESelection,
    AoETopPSelection,
    AutonomousSelection,
    LoryPrefixSelection,
    LorySelection,
    MergedSelection,
    RoutedSelection,
    SegmentExpertChoiceSelection,
    SmearSelection,
    TopKSelection,
)
from moe_parallel.config.selection.parts import (
    Balancing,
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
)
from moe_parallel.errors import InputError


def validate_selection(config: Config) -> None:
    """Raise InputError for the first rule of the chosen system that `config` breaks.

    The model has experts; single values are known to be in their ranges.
    """
    for part, rule in _RULES.items():
        if isinstance(config.selection, part):
            rule(config, config.selection)


def _experts(config: Config) -> int:
    assert config.moe.num_experts is not None
    return config.moe.num_experts


def _fixed(config: Config, selection: FixedChoices) -> None:
    if selection.moe_router_topk > _experts(config):
        raise InputError(
            f"--moe-router-topk is {selection.moe_router_topk}, above --num-experts "
            f"{_experts(config)}: choose at most {_experts(config)}"
        )


def _groups(config: Config, selection: TopKSelection) -> None:
    num_groups, topk = selection.moe_router_num_groups, selection.moe_router_group_topk
    n = _experts(config)
    if (num_groups is None) != (topk is None):
        missing = "--moe-router-group-topk" if topk is None else "--moe-router-num-groups"
        raise InputError(
            f"{missing} is not set: group-limited routing takes --moe-router-num-groups and "
            "--moe-router-group-topk together"
        )
    if num_groups is None or topk is None:
        return
    if n % num_groups:
        raise InputError(
            f"--moe-router-num-groups is {num_groups}, which does not divide --num-experts {n}: "
            "choose a divisor"
        )
    if topk > num_groups:
        raise InputError(
            f"--moe-router-group-topk is {topk}, above --moe-router-num-groups {num_groups}: "
            f"choose at most {num_groups}"
        )
    if selection.moe_router_topk > topk * (n // num_groups):
        raise InputError(
            f"--moe-router-topk is {selection.moe_router_topk}, but --moe-router-group-topk {topk} "
            f"of --moe-router-num-groups {num_groups} leaves {topk * (n // num_groups)} experts "
            "to choose from: lower it or allow more groups"
        )


def _dynamic(config: Config, selection: DynamicChoices) -> None:
    most = selection.moe_inference_max_experts
    if most is not None and most > _experts(config):
        raise InputError(
            f"--moe-inference-max-experts is {most}, above --num-experts "
            f"{_experts(config)}: choose at most {_experts(config)}, or none"
        )


def _experts_choose(config: Config, selection: ExpertsChoose) -> None:
    factor, n = selection.moe_expert_choice_capacity_factor, _experts(config)
    if factor > n:
        raise InputError(
            f"--moe-expert-choice-capacity-factor is {factor}, above --num-experts {n}: at {n} "
            "every expert takes every token already"
        )


def _shared(config: Config, selection: DispatchedSelection) -> None:
    width = selection.moe_shared_expert_intermediate_size
    if width is None:
        for name in ("gate", "overlap"):
            if getattr(selection, f"moe_shared_expert_{name}"):
                raise InputError(
                    f"--moe-shared-expert-{name} is true, but there is no shared expert: set "
                    "--moe-shared-expert-intermediate-size"
                )
        return
    limit = _experts(config) * (config.moe.moe_ffn_hidden_size or config.model.ffn_hidden_size)
    if width > limit:
        raise InputError(
            f"--moe-shared-expert-intermediate-size is {width}, more than the {limit} of all "
            f"{_experts(config)} experts together: shared experts must not outnumber them"
        )
    tp = config.parallel.tensor_model_parallel_size
    if width % tp:
        raise InputError(
            f"--moe-shared-expert-intermediate-size is {width}, which "
            f"--tensor-model-parallel-size {tp} does not divide: choose a multiple of {tp}"
        )


def _routed(config: Config, selection: RoutedSelection) -> None:
    method = selection.moe_gate_up_init_method
    if method != "normal" and selection.moe_gate_low_rank_size is None:
        raise InputError(
            f"--moe-gate-up-init-method is {method}, but W_g is whole: set "
            "--moe-gate-low-rank-size, or leave it out"
        )


def _autonomous(config: Config, selection: AutonomousSelection) -> None:
    etp, width = config.parallel.expert_tensor_size, config.model.hidden_size
    if selection.aoe_gather_w_down and width % etp:
        raise InputError(
            f"--aoe-gather-w-down cuts W_down along --hidden-size {width}, which "
            f"--expert-tensor-parallel-size {etp} does not divide: choose a multiple of {etp}, or "
            "leave it out"
        )
    _gradient(config, selection)


def _gradient(config: Config, selection: AutonomousSelection) -> None:
    if selection.aoe_gradient != "selected":
        return
    reason = None
    if isinstance(selection, Balancing):
        for name in ("moe_aux_loss_coeff", "moe_importance_loss_coeff", "moe_entropy_loss_coeff"):
            if getattr(selection, name, 0):
                reason = f"--{name.replace('_', '-')} {getattr(selection, name)}"
    over_all = getattr(selection, "aoe_gate", None) == "all" or isinstance(
        selection, AoETopPSelection
    )
    if over_all or getattr(selection, "moe_expert_choice_scores", None) == "softmax":
        reason = "gates that are a softmax over all norms"
    if reason is not None:
        raise InputError(
            f"--aoe-gradient is selected, but {reason} has a gradient through the norms of experts "
            "that are not selected: use full, or selected_despite_aux to drop that part"
        )


def _screening(config: Config, selection: AoESelection) -> None:
    if selection.aoe_fp8_screening == 0:
        return
    chosen = f"--aoe-fp8-screening is {selection.aoe_fp8_screening}"
    if selection.aoe_gradient == "full":
        raise InputError(
            f"{chosen}, but --aoe-gradient full goes through all norms, and those in FP8 have no "
            "gradient: set --aoe-gradient selected, or selected_despite_aux"
        )
    if selection.aoe_gate == "all":
        raise InputError(
            f"{chosen}, but --aoe-gate all weighs by all norms, most of which would be rounded to "
            "FP8: set --aoe-gate selected"
        )
    if selection.moe_router_force_load_balancing:
        raise InputError(
            f"{chosen}, but --moe-router-force-load-balancing chooses without norms: leave one of "
            "them out"
        )
    most = _experts(config) - selection.moe_router_topk - 1
    if selection.aoe_fp8_screening > most:
        raise InputError(
            f"{chosen}, which with --moe-router-topk {selection.moe_router_topk} leaves none of "
            f"--num-experts {_experts(config)} out: choose at most {max(most, 0)}"
        )


def _segments(config: Config, selection: Any) -> None:
    length, seq_length = selection.lory_segment_length, config.training.seq_length
    if length > seq_length:
        raise InputError(
            f"--lory-segment-length is {length}, above --seq-length {seq_length}: choose at most "
            f"{seq_length}"
        )


def _merged(config: Config, selection: MergedSelection) -> None:
    parallel, moe = config.parallel, config.moe
    if parallel.expert_model_parallel_size > 1:
        raise InputError(
            f"--expert-model-parallel-size is {parallel.expert_model_parallel_size}, but merged "
            "experts are divided by their matrices: leave it out and raise "
            "--tensor-model-parallel-size"
        )
    if parallel.expert_tensor_size != parallel.tensor_model_parallel_size:
        raise InputError(
            f"--expert-tensor-parallel-size is {parallel.expert_tensor_size}, but merged experts "
            "are divided over --tensor-model-parallel-size "
            f"{parallel.tensor_model_parallel_size}: leave it out"
        )
    if moe.moe_expert_capacity_factor is not None:
        raise InputError(
            f"--moe-expert-capacity-factor is {moe.moe_expert_capacity_factor}, but no token is "
            "sent to merged experts: leave it out"
        )


def _smear(config: Config, selection: SmearSelection) -> None:
    if not selection.smear_sees_the_future:
        raise InputError(
            "--expert-selection smear lets every token see its whole sequence, which is no "
            "language model: use lory, or add --smear-sees-the-future to train it all the same"
        )


_RULES: dict[type, Callable[[Config, Any], None]] = {
    FixedChoices: _fixed,
    TopKSelection: _groups,
    DynamicChoices: _dynamic,
    ExpertsChoose: _experts_choose,
    DispatchedSelection: _shared,
    RoutedSelection: _routed,
    AutonomousSelection: _autonomous,
    AoESelection: _screening,
    MergedSelection: _merged,
    LorySelection: _segments,
    LoryPrefixSelection: _segments,
    SegmentExpertChoiceSelection: _segments,
    SmearSelection: _smear,
}
