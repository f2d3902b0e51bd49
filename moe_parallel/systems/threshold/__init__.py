"""threshold, aoe_threshold: an expert takes the tokens that score above its cutoff. The options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.kinds import AutonomousSelection, RoutedSelection
from moe_parallel.config.selection.selection import (
    MEMORY_OF_A_RUN,
    Selection,
    TimeConstant,
    kept_share,
)
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


_LEAST_EMA = 0.9


@dataclass(frozen=True)
class Cutoffs(Selection):
    """Expert threshold routing (arXiv 2603.11535): cutoffs that follow the scores' quantiles."""

    moe_threshold_target_experts: float = option(
        2.0,
        "mean number of experts per token (K): each expert takes K / n of the tokens",
        above=0,
    )
    moe_threshold_update: str = option(
        "quantile",
        "how the cutoffs move after a step: a running mean of the scores' quantiles (quantile), or "
        "by a rate: a cutoff rises if more than K / n of the tokens exceeded it, and falls if "
        "fewer did (sign)",
        choices=("quantile", "sign"),
        state=True,
    )
    moe_threshold_ema: float | None = option(
        None,
        "share of the cutoffs that a quantile update keeps (beta); none: 1 - 1 / (0.05 "
        "--train-iters), at least 0.9",
        least=0,
        below=1,
    )
    moe_threshold_update_rate: float = option(
        1e-2, "change of a cutoff per step, with --moe-threshold-update sign", above=0
    )

    @property
    def mean_choices(self) -> float:
        return self.moe_threshold_target_experts

    @property
    def uses_step_load(self) -> bool:
        return True

    def ema(self, train_iters: int | None) -> float:
        """beta in a run of so many iterations; None: no run trains the layer."""
        if self.moe_threshold_ema is not None:
            return self.moe_threshold_ema
        if train_iters is None:
            return _LEAST_EMA
        return max(_LEAST_EMA, kept_share(MEMORY_OF_A_RUN * train_iters))

    def first_cutoff(self, hidden_size: int, num_experts: int, init_std: float) -> float:
        """The number that K / n of the scores exceed with initial weights, for tokens of RMS 1."""
        raise NotImplementedError

    def time_constants(self, config: Config) -> list[TimeConstant]:
        update = self.moe_threshold_update
        if update == "quantile":
            steps = 1 / (1 - self.ema(config.training.train_iters))
            remedy = "lower --moe-threshold-ema"
        else:
            steps = self.score_range(config) / self.moe_threshold_update_rate
            remedy = "raise --moe-threshold-update-rate"
        own = TimeConstant(f"cutoffs ({update})", steps, remedy)
        return [*super().time_constants(config), own]

    def note(self, config: Config) -> str:
        start = self.first_cutoff(
            config.model.hidden_size, config.num_experts, config.model.init_method_std
        )
        by = f"by {self.moe_threshold_update_rate:g} a step"
        if self.moe_threshold_update == "quantile":
            ema = self.ema(config.training.train_iters)
            by = f"with the scores' quantiles, by an EMA of {ema:.6g}"
        return f"cutoffs start at {start:.4g} and move {by}"

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        k, n = self.moe_threshold_target_experts, config.num_experts
        if k >= n:
            raise InputError(
                f"--moe-threshold-target-experts is {k}, not below --num-experts {n}, with which "
                "every expert takes every token: lower it"
            )
        self._check_update()
        check_no_capacity(self, config)

    def _check_update(self) -> None:
        update, rate = self.moe_threshold_update, self.moe_threshold_update_rate
        if self.moe_threshold_ema is not None and update != "quantile":
            raise InputError(
                f"--moe-threshold-ema is {self.moe_threshold_ema}, but --moe-threshold-update is "
                f"{update}: set it to quantile, or remove the EMA"
            )
        if rate != Cutoffs.moe_threshold_update_rate and update != "sign":
            raise InputError(
                f"--moe-threshold-update-rate is {rate}, but --moe-threshold-update is {update}: "
                "set it to sign, or remove the rate"
            )


@dataclass(frozen=True)
class ThresholdSelection(Cutoffs, RoutedSelection, system="threshold"):
    """Each expert takes the tokens whose score exceeds its own cutoff (Sun et al. 2026)."""

    def first_cutoff(self, hidden_size: int, num_experts: int, init_std: float) -> float:
        std = self._initial_std(hidden_size, init_std)
        return exceeded_normal(self.mean_choices / num_experts, std)

    def score_range(self, config: Config) -> float:
        """Eight standard deviations of the initial logits."""
        return 8 * self._initial_std(config.model.hidden_size, config.model.init_method_std)

    def _initial_std(self, hidden_size: int, init_std: float) -> float:
        """The standard deviation of the initial logits, for tokens of RMS 1."""
        std = init_std * math.sqrt(hidden_size)
        if self.moe_router_hidden_size is not None:
            std *= init_std * math.sqrt(self.moe_router_hidden_size)
        return std

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_z_loss_coeff:
            raise InputError(
                f"--moe-z-loss-coeff is {self.moe_z_loss_coeff}, but --expert-selection threshold "
                "has no softmax whose logits it could bound: leave it out"
            )


@dataclass(frozen=True)
class AoEThresholdSelection(Cutoffs, AutonomousSelection, system="aoe_threshold"):
    """AoE with expert thresholds: each expert takes the tokens whose norm exceeds its cutoff."""

    aoe_threshold_gate: str = option(
        "softmax",
        "routing probabilities: softmax over the norms of all experts, not renormalized (softmax), "
        "or the sigmoid of the norm minus the cutoff (sigmoid)",
        choices=("softmax", "sigmoid"),
        weights=True,
    )

    @property
    def probs_over_all(self) -> bool:
        return self.aoe_threshold_gate == "softmax"

    def first_cutoff(self, hidden_size: int, num_experts: int, init_std: float) -> float:
        std = init_std * math.sqrt(hidden_size)
        return exceeded_norm(self.mean_choices / num_experts, std, self.aoe_low_rank_size)


def check_no_capacity(selection: Selection, config: Config) -> None:
    """Raise InputError for a capacity, for a system whose training is causal without one."""
    factor = config.moe.moe_expert_capacity_factor
    if factor is not None:
        raise InputError(
            f"--moe-expert-capacity-factor is {factor}, but what a full expert drops depends on "
            f"later tokens, and with --expert-selection {selection.system} it must not: "
            "leave it out"
        )


def exceeded_normal(share: float, std: float) -> float:
    """The number that a share of N(0, std^2) exceeds."""
    return std * _standard(share)


def exceeded_norm(share: float, std: float, size: int) -> float:
    """The number that a share of the L2 norms of `size` numbers of N(0, std^2) exceeds.

    The squares have a chi-squared distribution, whose cube root is nearly normal (Wilson and
    Hilferty 1931).
    """
    variance = 2 / (9 * size)
    root = 1 - variance + _standard(share) * math.sqrt(variance)
    return std * math.sqrt(size * max(root, 0) ** 3)


def _standard(share: float) -> float:
    return NormalDist().inv_cdf(min(max(1 - share, 1e-9), 1 - 1e-9))  # finite
