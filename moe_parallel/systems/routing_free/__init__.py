"""routing_free: AoE's norms, less a learned bias, above one threshold. The options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.kinds import AutonomousSelection
from moe_parallel.config.selection.selection import (
    MovingCoefficient,
    TimeConstant,
    check_at_most_all,
)

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

from moe_parallel.systems.threshold import check_no_capacity

_OF_INITIAL_NORM = 0.39  # the paper's threshold of 1, over its typical initial norm of 2.56


_PAPER = 1e-10  # the coefficient that the paper starts with


@dataclass(frozen=True)
class RoutingFreeSelection(AutonomousSelection, system="routing_free"):
    """Every expert whose norm, less a learned bias, exceeds a threshold (Liu et al. 2026)."""

    # Exact: only the chosen experts' norms have a gradient.
    aoe_gradient: str = with_default(AutonomousSelection, "aoe_gradient", "selected")
    routing_free_target_experts: float = option(
        2.0,
        "mean number of experts per token (K) at which the controller of the loss aims",
        above=0,
    )
    routing_free_threshold: float | None = option(
        None,
        "theta; none: 0.39 --init-method-std sqrt(--hidden-size --aoe-low-rank-size), the paper's "
        "share of the initial norm",
        above=0,
    )
    routing_free_gate: str = option(
        "norm",
        "routing probabilities: the norm less the bias, as it is (norm), or its softmax over the "
        "chosen experts, as in AoE (softmax)",
        choices=("norm", "softmax"),
        weights=True,
    )
    routing_free_expert_share: float = option(
        0.5,
        "mu, the share of the loss that balances experts; the rest balances tokens",
        least=0,
        most=1,
    )
    routing_free_coeff_init: float | None = option(
        None,
        "initial coefficient lambda of the loss; none: the value from which it can grow to 1e-3 in "
        "the first 5% of --train-iters, but at least the paper's 1e-10",
        above=0,
        most=1,
    )
    routing_free_coeff_multiplier: float = option(
        1.02,
        "1 + eta: after each step, multiply lambda by this if tokens had more than K experts on "
        "average, and divide it by this if they had fewer; it stays below 1",
        above=1,
    )

    @property
    def mean_choices(self) -> float:
        return self.routing_free_target_experts

    @property
    def controlled(self) -> str:
        return "balance_coefficient"

    @property
    def depends_on_init_std(self) -> bool:
        return self.routing_free_threshold is None

    def theta(self, hidden_size: int, init_std: float) -> float:
        """The threshold of a model of this width and these initial weights."""
        if self.routing_free_threshold is not None:
            return self.routing_free_threshold
        return _OF_INITIAL_NORM * init_std * math.sqrt(hidden_size * self.aoe_low_rank_size)

    def initial_coefficient(self, train_iters: int | None) -> float:
        """lambda in the first step of a run of so many iterations. None: no run."""
        return self._coefficient.initial(train_iters)

    @property
    def _coefficient(self) -> MovingCoefficient:
        init, multiplier = self.routing_free_coeff_init, self.routing_free_coeff_multiplier
        return MovingCoefficient("balancing loss", "--routing-free-coeff", init, multiplier, _PAPER)

    def time_constants(self, config: Config) -> list[TimeConstant]:
        own = self._coefficient.time_constant(config.training.train_iters)
        return [*super().time_constants(config), own]

    def note(self, config: Config) -> str:
        theta = self.theta(config.model.hidden_size, config.model.init_method_std)
        initial = self.initial_coefficient(config.training.train_iters)
        return (
            f"the threshold of Routing-Free MoE is {theta:.4g}; the coefficient of its loss begins "
            f"at {initial:.3g} in a run of {config.training.train_iters} iterations"
        )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        check_at_most_all(self, "routing_free_target_experts", config)
        check_no_capacity(self, config)
