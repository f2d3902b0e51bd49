"""top_p, aoe_top_p: the most probable experts, until their probabilities sum to p. The options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import flag
from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.balancing import Balancing
from moe_parallel.config.selection.kinds import AutonomousSelection, RoutedSelection
from moe_parallel.config.selection.parts import FreeExperts, TokensChoose
from moe_parallel.config.selection.selection import TimeConstant, check_at_most_all
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class DynamicChoices(TokensChoose):
    """Top-p: the fewest experts whose probabilities sum to p (Huang et al. 2024)."""

    moe_top_p: float = option(
        0.4,
        "p: a token takes its most probable experts until their probabilities sum to p",
        above=0,
        most=1,
    )
    moe_top_p_strict: bool = option(
        False,
        "stop when the sum exceeds p (the authors' code) instead of when it reaches p (the paper)",
    )
    moe_top_p_renormalize: bool = option(
        False,
        "divide the probabilities of the chosen experts by their sum (DTop-p); false: weight by "
        "the probabilities as they are (Huang et al.)",
        weights=True,
    )
    moe_inference_top_p: float | None = option(
        None, "p in evaluation; none: --moe-top-p", above=0, most=1
    )
    moe_inference_max_experts: int | None = option(
        None, "maximum number of experts per token in evaluation; none: no limit", least=1
    )
    moe_top_p_target_experts: float | None = option(
        None,
        "move p after each step so that tokens have this number of experts (K) on average over all "
        "layers; --moe-top-p is then the p of the first step. none: p is fixed",
        state=True,
        least=1,
    )
    moe_top_p_proportional_gain: float = option(
        0.5, "how much p follows the error (K - mean number) / n of the latest step", least=0
    )
    moe_top_p_integral_gain: float = option(
        0.2, "how much p follows the sum of the errors of all steps", above=0
    )
    moe_entropy_loss_coeff: float = option(
        1e-4,
        "coefficient of the dynamic loss, the mean entropy of the routing probabilities; 0: off",
        least=0,
    )

    @property
    def mean_choices(self) -> float | None:
        return self.moe_top_p_target_experts

    @property
    def renormalizes(self) -> bool:
        return self.moe_top_p_renormalize

    @property
    def controlled(self) -> str | None:
        return None if self.moe_top_p_target_experts is None else "top_p"

    @property
    def losses_of_all_scores(self) -> list[str]:
        own = ["moe_entropy_loss_coeff"] if self.moe_entropy_loss_coeff else []
        return super().losses_of_all_scores + own

    def time_constants(self, config: Config) -> list[TimeConstant]:
        """That of p is (1 + K_p) / K_i, where the experts are equally probable."""
        found = super().time_constants(config)
        if self.moe_top_p_target_experts is None:
            return found
        steps = (1 + self.moe_top_p_proportional_gain) / self.moe_top_p_integral_gain
        return [*found, TimeConstant("controlled p", steps, "raise --moe-top-p-integral-gain")]

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        for name in ("moe_inference_max_experts", "moe_top_p_target_experts"):
            if getattr(self, name) is not None:
                check_at_most_all(self, name, config, or_else=", or none")
        if self.moe_top_p_target_experts is None:
            self._check_fixed_p()

    def _check_fixed_p(self) -> None:
        for name in ("moe_top_p_proportional_gain", "moe_top_p_integral_gain"):
            value = getattr(self, name)
            if value != getattr(DynamicChoices, name):
                raise InputError(
                    f"{flag(name)} is {value}, but p is fixed: set --moe-top-p-target-experts, or "
                    "leave it out"
                )


@dataclass(frozen=True)
class TopPSelection(FreeExperts, DynamicChoices, Balancing, RoutedSelection, system="top_p"):
    """Dynamic routing: the fewest experts whose probabilities sum to p (Huang et al. 2024)."""

    moe_router_load_balancing_type: str = with_default(
        Balancing, "moe_router_load_balancing_type", "seq_aux_loss"
    )


@dataclass(frozen=True)
class AoETopPSelection(DynamicChoices, Balancing, AutonomousSelection, system="aoe_top_p"):
    """AoE with top-p: the fewest experts whose softmax of norms sums to p."""

    moe_top_p: float = with_default(DynamicChoices, "moe_top_p", 0.6)

    @property
    def probs_over_all(self) -> bool:
        return True
