"""The options that balance the load, by losses or by a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_parallel.config.message import shown
from moe_parallel.config.option import option
from moe_parallel.config.selection.selection import (
    MEMORY_OF_A_RUN,
    MOST_OF_A_RUN,
    Selection,
    TimeConstant,
    kept_share,
)
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class Balancing(Selection):
    """Auxiliary losses that balance the load."""

    moe_aux_loss_coeff: float = option(
        0.01,
        "coefficient alpha of the load-balancing loss, alpha * n * sum f_i P_i, with f_i the share "
        "of tokens that chose expert i and P_i its mean probability; 0: off",
        least=0,
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        "scope of f and P in the load-balancing loss: a micro-batch (aux_loss), each sequence "
        "(seq_aux_loss), or f over the previous global batch (global_aux_loss)",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        state=True,
    )
    moe_importance_loss_coeff: float = option(
        0.0,
        "coefficient of the importance loss, (std / mean)^2 over the experts of their summed "
        "routing probabilities; 0: off",
        least=0,
    )

    @property
    def losses_of_all_scores(self) -> list[str]:
        own = ("moe_aux_loss_coeff", "moe_importance_loss_coeff")
        return super().losses_of_all_scores + [name for name in own if getattr(self, name)]

    @property
    def by_sequence(self) -> bool:
        return self.moe_router_load_balancing_type == "seq_aux_loss" or super().by_sequence

    @property
    def uses_step_load(self) -> bool:
        of_the_step_before = self.moe_router_load_balancing_type == "global_aux_loss"
        return (of_the_step_before and self.moe_aux_loss_coeff != 0) or super().uses_step_load


@dataclass(frozen=True)
class BiasBalancing(Balancing):
    """Load balance by losses, or without one (Wang et al. 2024): a bias for the selection only."""

    moe_router_enable_expert_bias: bool = option(
        False,
        "balance the load without a loss: add a bias to the probabilities (AoE and UoE: to the "
        "norms) for the selection only; after each step it rises for experts chosen less than the "
        "mean and falls for the others",
        weights=True,
    )
    moe_router_bias_update: str = option(
        "sign",
        "how the bias moves after a step: by the rate, up or down (sign); by the rate times the "
        "relative error of the load (error); by the rate times that error and its growth (id); or "
        "to the values that would have balanced the step (quantile)",
        choices=("sign", "error", "id", "quantile"),
        state=True,
    )
    moe_router_bias_update_rate: float | None = option(
        1e-3,
        "change of the balancing bias per step; quantile has none. none: so large that the bias "
        "crosses the range of the scores that it shifts in a quarter of --train-iters",
        above=0,
    )
    moe_router_bias_ema: float | None = option(
        0.0,
        "share of the bias that a quantile update keeps; none: so large that the bias averages "
        "over a twentieth of --train-iters",
        least=0,
        below=1,
    )

    moe_router_bias_frozen_share: float = option(
        0.0,
        "share of --train-iters, the last of them, in which the balancing bias stays as it is; "
        "0.034 in DeepSeek-V3",
        least=0,
        most=1,
    )

    @property
    def uses_step_load(self) -> bool:
        return self.moe_router_enable_expert_bias or super().uses_step_load

    def bias_moves(self, iteration: int, train_iters: int | None) -> bool:
        if train_iters is None:
            return True
        return iteration < round((1 - self.moe_router_bias_frozen_share) * train_iters)

    @property
    def balancing_warning(self) -> str | None:
        coefficient = self.moe_aux_loss_coeff
        if not (self._solves and coefficient):
            return super().balancing_warning
        return (
            "a quantile update of the bias balances every step, and the loss of "
            f"--moe-aux-loss-coeff {coefficient} moves the scores on which it is based: set the "
            "coefficient to 0 unless you compare the two"
        )

    def time_constants(self, config: Config) -> list[TimeConstant]:
        found = super().time_constants(config)
        if not self.moe_router_enable_expert_bias:
            return found
        update = self.moe_router_bias_update
        if update == "quantile":
            steps, remedy = 1 / (1 - self._bias_ema(config)), "lower --moe-router-bias-ema"
        else:
            steps = self.score_range(config) / self._bias_rate(config)
            remedy = "raise --moe-router-bias-update-rate (none: by the length of the run)"
        return [*found, TimeConstant(f"balancing bias ({update})", steps, remedy)]

    def rescaled(self, config: Config) -> Selection:
        rate, ema = self._bias_rate(config), self._bias_ema(config)
        options = {"moe_router_bias_update_rate": rate, "moe_router_bias_ema": ema}
        return replace(super().rescaled(config), **options)

    @property
    def _solves(self) -> bool:
        return self.moe_router_enable_expert_bias and self.moe_router_bias_update == "quantile"

    def _bias_rate(self, config: Config) -> float:
        rate = self.moe_router_bias_update_rate
        if rate is not None:
            return rate
        return self.score_range(config) / (MOST_OF_A_RUN * config.training.train_iters)

    def _bias_ema(self, config: Config) -> float:
        ema = self.moe_router_bias_ema
        return kept_share(MEMORY_OF_A_RUN * config.training.train_iters) if ema is None else ema

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        update = self.moe_router_bias_update
        if update != "sign" and not self.moe_router_enable_expert_bias:
            raise InputError(
                f"--moe-router-bias-update is {update}, but there is no bias: set "
                "--moe-router-enable-expert-bias"
            )
        frozen = self.moe_router_bias_frozen_share
        if frozen and not self.moe_router_enable_expert_bias:
            raise InputError(
                f"--moe-router-bias-frozen-share is {frozen}, but there is no bias: set "
                "--moe-router-enable-expert-bias"
            )
        if update != "quantile":
            if self.moe_router_bias_ema != 0:
                raise InputError(
                    f"--moe-router-bias-ema is {shown(self.moe_router_bias_ema)}, but "
                    f"--moe-router-bias-update is {update}: set it to quantile, or remove the EMA"
                )
            return
        rate = self.moe_router_bias_update_rate
        if rate is not None and rate != type(self).moe_router_bias_update_rate:
            raise InputError(
                f"--moe-router-bias-update-rate is {shown(rate)}, but --moe-router-bias-update is "
                "quantile, which has no rate: remove the rate, or use sign, error or id"
            )
        if self.choices_per_token == config.num_experts:
            raise InputError(
                "--moe-router-bias-update is quantile, but every token takes all "
                f"{config.num_experts} experts: lower --moe-router-topk"
            )
        if getattr(self, "moe_router_num_groups", None) is not None:  # of topk
            raise InputError(
                "--moe-router-bias-update is quantile, which does not support groups: use sign, "
                "error or id, or leave out --moe-router-num-groups"
            )
        factor = config.moe.moe_expert_capacity_factor
        if factor is not None:
            raise InputError(
                f"--moe-expert-capacity-factor is {factor}, but --moe-router-bias-update is "
                "quantile, which keeps loads equal by itself, and what a full expert drops depends "
                "on later tokens: leave it out, or use sign, error or id"
            )
