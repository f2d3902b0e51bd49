"""lory, lory_prefix, segment_expert_choice: an earlier segment routes a segment. The options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option, with_default
from moe_parallel.config.selection.kinds import MergedSelection, RoutedSelection, Segments

if TYPE_CHECKING:
    pass

from moe_parallel.systems.expert_choice import ExpertsChoose

OWN_FIRST_SEGMENT = (
    "tokens of the first segment see its mean, later tokens too: judge by the loss after the first "
    "segment, which evaluations give as well, or set --lory-first-segment uniform"
)


@dataclass(frozen=True)
class SegmentMergedSelection(Segments, MergedSelection):
    """The mean of an earlier segment gives the merge weights of a segment."""

    lory_first_segment: str = option(
        "own",
        "merge weights of the first segment: from its own mean, without gradient, as in the "
        "paper (own; its tokens then see later ones), or 1/n each (uniform)",
        choices=("own", "uniform"),
    )

    @property
    def settled_after(self) -> int | None:
        return 0 if self.lory_first_segment == "uniform" else super().settled_after

    @property
    def warning(self) -> str | None:
        return None if self.lory_first_segment == "uniform" else OWN_FIRST_SEGMENT


@dataclass(frozen=True)
class LorySelection(SegmentMergedSelection, system="lory"):
    """Lory: the previous segment gives a segment's merge weights (Zhong et al. 2024)."""

    lory_inference: str = option(
        "segment",
        "in evaluation, route each segment as in training (segment), or once by the mean of "
        "the first segment (prompt)",
        choices=("segment", "prompt"),
    )


@dataclass(frozen=True)
class LoryPrefixSelection(SegmentMergedSelection, system="lory_prefix"):
    """Prefix routing (Lory, section 5.1): the first segment gives the merge weights of all."""


@dataclass(frozen=True)
class SegmentExpertChoiceSelection(
    ExpertsChoose, Segments, RoutedSelection, system="segment_expert_choice"
):
    """Each expert takes whole segments, by the mean of the previous one (Lory, section 5.3)."""

    # Here it counts segments instead of tokens.
    moe_expert_choice_capacity_factor: float = with_default(
        ExpertsChoose, "moe_expert_choice_capacity_factor", 1.0
    )
    moe_expert_choice_scores: str = with_default(
        ExpertsChoose, "moe_expert_choice_scores", "softmax"
    )

    @property
    def warning(self) -> str:
        return (
            "experts choose among all segments of a micro-batch, later ones too, and the first "
            "segment is judged by its own mean, so the training loss is not the likelihood of the "
            "text; in evaluations each segment chooses its experts: judge by the loss after the "
            "first"
        )
