"""smear: the mean of a sequence gives its merge weights; not causal. The options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.kinds import MergedSelection, refuse_own_documents
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class SmearSelection(MergedSelection, system="smear"):
    """SMEAR: the mean of the whole sequence gives the merge weights (Muqeeth et al. 2023)."""

    smear_expert_dropout: float = option(
        0.1, "probability that an expert is left out of a merge in training", least=0, below=1
    )
    smear_sees_the_future: bool = option(
        False,
        "must be true to train a language model with SMEAR: every token then sees the whole "
        "sequence, and the loss is not a likelihood",
    )

    @property
    def settled_after(self) -> int | None:
        return None

    @property
    def warning(self) -> str:
        return (
            "every token sees the mean of its whole sequence, so the loss is not the likelihood of "
            "the text, neither in training nor in evaluations"
        )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        refuse_own_documents(self, config)
        if not self.smear_sees_the_future:
            raise InputError(
                "--expert-selection smear lets every token see its whole sequence, so it is not a "
                "language model: use lory, or add --smear-sees-the-future to train it anyway"
            )
