"""Experts are merged into one before they compute: Lory and SMEAR."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.option import option
from moe_parallel.config.selection.parts import ExpertSelection

OWN_FIRST_SEGMENT = (
    "tokens of the first segment see its mean, later tokens too: judge by the loss after the first "
    "segment, which evaluations give as well, or set --lory-first-segment uniform"
)


@dataclass(frozen=True)
class MergedSelection(ExpertSelection):
    """A softmax router weighs the matrices of all experts, and their sum computes the tokens."""

    @property
    def choices_per_token(self) -> int:
        """One merged expert computes a token."""
        return 1


@dataclass(frozen=True)
class SegmentMergedSelection(MergedSelection):
    """Experts are merged for whole segments, by the mean of an earlier one."""

    lory_segment_length: int = option(256, "tokens in a segment (T_s)")
    lory_first_segment: str = option(
        "own",
        "what merges the experts of the first segment: its own mean, without gradient, as in the "
        "paper, by which its tokens see later ones; or 1/n each (uniform)",
        choices=("own", "uniform"),
    )

    @property
    def first_part(self) -> int:
        return self.lory_segment_length

    @property
    def caution(self) -> str | None:
        return None if self.lory_first_segment == "uniform" else OWN_FIRST_SEGMENT


@dataclass(frozen=True)
class LorySelection(SegmentMergedSelection):
    """Lory: the segment before decides how a segment's experts are merged (Zhong et al. 2024)."""

    lory_inference: str = option(
        "segment",
        "in evaluations, route each segment as in training, or once, by the mean of the first "
        "segment as the prompt",
        choices=("segment", "prompt"),
    )


@dataclass(frozen=True)
class LoryPrefixSelection(SegmentMergedSelection):
    """The baseline of Lory, section 5.1: the first segment merges the experts of all."""


@dataclass(frozen=True)
class SmearSelection(MergedSelection):
    """SMEAR: the mean of the whole sequence merges the experts (Muqeeth et al. 2023)."""

    smear_expert_dropout: float = option(
        0.1, "in training, the probability that an expert is left out of a merge"
    )
    smear_sees_the_future: bool = option(
        False,
        "train a language model with SMEAR although every token then sees the whole sequence, so "
        "that its loss is no likelihood",
    )

    @property
    def caution(self) -> str:
        return (
            "every token sees the mean of its whole sequence, so the loss is not the likelihood of "
            "the text, neither in training nor in evaluations"
        )
