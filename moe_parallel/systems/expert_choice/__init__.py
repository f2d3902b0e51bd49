"""expert_choice, aoe_expert_choice: experts choose tokens. The options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.kinds import AutonomousSelection, RoutedSelection
from moe_parallel.config.selection.selection import Selection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class ExpertsChoose(Selection):
    """Experts choose among all tokens of the micro-batch, also later ones (Zhou et al. 2022)."""

    moe_expert_choice_capacity_factor: float = option(
        2.0, "each expert takes round(factor * tokens / n) tokens", above=0
    )
    moe_expert_choice_scores: str = option(
        "raw",
        "scores by which experts rank tokens and weight their outputs: as they are (raw), or their "
        "softmax over experts (softmax)",
        choices=("raw", "softmax"),
    )

    @property
    def mean_choices(self) -> float:
        return self.moe_expert_choice_capacity_factor

    @property
    def warning(self) -> str:
        return (
            "experts choose among all tokens of a micro-batch, later ones too, so the training "
            "loss is not the likelihood of the text; in evaluations each token chooses its experts"
        )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        factor, n = self.moe_expert_choice_capacity_factor, config.num_experts
        if factor > n:
            raise InputError(
                f"--moe-expert-choice-capacity-factor is {factor}, above --num-experts {n}: at {n} "
                "every expert takes every token already"
            )


@dataclass(frozen=True)
class ExpertChoiceSelection(ExpertsChoose, RoutedSelection, system="expert_choice"):
    """Each expert takes the tokens with the highest scores for it (Zhou et al. 2022)."""


@dataclass(frozen=True)
class AoEExpertChoiceSelection(ExpertsChoose, AutonomousSelection, system="aoe_expert_choice"):
    """AoE with expert choice: each expert takes the tokens with the largest norms."""

    @property
    def probs_over_all(self) -> bool:
        return self.moe_expert_choice_scores == "softmax"
