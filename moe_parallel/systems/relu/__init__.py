"""relu: every expert with a positive router logit (ReMoE). The options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.kinds import RoutedSelection
from moe_parallel.config.selection.selection import (
    MovingCoefficient,
    TimeConstant,
    check_at_most_all,
)
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


_PAPER = 1e-8  # the coefficient that the paper starts with, for 60,000 steps


@dataclass(frozen=True)
class ReLUSelection(RoutedSelection, system="relu"):
    """A token takes every expert with a positive router logit (Wang et al. 2025, ReMoE)."""

    moe_relu_target_experts: float = option(
        2.0,
        "mean number of experts per token (K) at which the controller of the L1 loss aims",
        above=0,
    )
    moe_relu_l1_coeff_init: float | None = option(
        None,
        "initial coefficient lambda of the L1 loss; none: the value from which it can grow to 1e-3 "
        "in the first 5% of --train-iters, but at least the paper's 1e-8",
        above=0,
    )
    moe_relu_l1_coeff_multiplier: float = option(
        1.2,
        "after each step, multiply lambda by this if tokens had more than K experts on average, "
        "and divide it by this if they had fewer",
        above=1,
    )

    @property
    def mean_choices(self) -> float:
        return self.moe_relu_target_experts

    @property
    def controlled(self) -> str:
        return "l1_coefficient"

    def initial_coefficient(self, train_iters: int | None) -> float:
        """lambda in the first step of a run of so many iterations. None: no run."""
        return self._coefficient.initial(train_iters)

    @property
    def _coefficient(self) -> MovingCoefficient:
        init, multiplier = self.moe_relu_l1_coeff_init, self.moe_relu_l1_coeff_multiplier
        return MovingCoefficient("L1 loss", "--moe-relu-l1-coeff", init, multiplier, _PAPER)

    def time_constants(self, config: Config) -> list[TimeConstant]:
        own = self._coefficient.time_constant(config.training.train_iters)
        return [*super().time_constants(config), own]

    def note(self, config: Config) -> str | None:
        if self.moe_relu_l1_coeff_init is not None:
            return None
        initial = self.initial_coefficient(config.training.train_iters)
        return (
            f"--moe-relu-l1-coeff-init is none: the coefficient of the L1 loss begins at "
            f"{initial:.3g} in a run of {config.training.train_iters} iterations"
        )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        check_at_most_all(self, "moe_relu_target_experts", config)
        if self.moe_z_loss_coeff:
            raise InputError(
                f"--moe-z-loss-coeff is {self.moe_z_loss_coeff}, but --expert-selection relu has "
                "no softmax whose logits it could bound: leave it out"
            )
        factor = config.moe.moe_expert_capacity_factor
        if factor is not None:
            raise InputError(
                f"--moe-expert-capacity-factor is {factor}, but with --expert-selection relu a "
                "token starts with half of all experts, most of which a capacity would drop: "
                "leave it out"
            )
