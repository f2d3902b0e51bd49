"""Systems that merge the experts into one before it computes: Lory and SMEAR."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from moe_parallel.config.option import option
from moe_parallel.config.selection.segments import Segments, refuse_own_documents
from moe_parallel.config.selection.selection import Selection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

OWN_FIRST_SEGMENT = (
    "tokens of the first segment see its mean, later tokens too: judge by the loss after the first "
    "segment, which evaluations give as well, or set --lory-first-segment uniform"
)


@dataclass(frozen=True)
class MergedSelection(Selection):
    """A softmax router weights the matrices of all experts, and their sum computes the tokens."""

    merges: ClassVar[bool] = True

    @property
    def merging_prefix(self) -> int | None:
        """The number of first tokens that merge the experts for a whole text. None: others do."""
        return None

    def merges_of_sequence(self, seq_length: int) -> tuple[int, int]:
        return 1, 1

    @property
    def choices_per_token(self) -> int:
        """One merged expert computes a token."""
        return 1

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        parallel, moe = config.parallel, config.moe
        if parallel.expert_model_parallel_size > 1:
            raise InputError(
                f"--expert-model-parallel-size is {parallel.expert_model_parallel_size}, but "
                "merged experts are divided by their matrices: leave it out and raise "
                "--tensor-model-parallel-size"
            )
        if parallel.expert_tensor_size != parallel.tensor_model_parallel_size:
            raise InputError(
                f"--expert-tensor-parallel-size is {parallel.expert_tensor_size}, but merged "
                "experts are divided over --tensor-model-parallel-size "
                f"{parallel.tensor_model_parallel_size}: leave it out"
            )
        if moe.moe_expert_capacity_factor is not None:
            raise InputError(
                f"--moe-expert-capacity-factor is {moe.moe_expert_capacity_factor}, but no token "
                "is sent to merged experts: leave it out"
            )
        if moe.moe_activation_budget is not None:
            raise InputError(
                f"--moe-activation-budget is {moe.moe_activation_budget}, but merged experts "
                "receive no rows, so their activations do not grow with the load: leave it out"
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

    def merges_of_sequence(self, seq_length: int) -> tuple[int, int]:
        segments = -(-seq_length // self.lory_segment_length)
        return segments, segments

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

    @property
    def by_prompt(self) -> bool:
        return self.lory_inference == "prompt"

    def routed_by_prompt(self) -> LorySelection:
        return replace(self, lory_inference="prompt")


@dataclass(frozen=True)
class LoryPrefixSelection(SegmentMergedSelection, system="lory_prefix"):
    """Prefix routing (Lory, section 5.1): the first segment gives the merge weights of all."""

    @property
    def merging_prefix(self) -> int:
        return self.lory_segment_length

    def merges_of_sequence(self, seq_length: int) -> tuple[int, int]:
        """The first segment has a merge of its own, because it has no gradient."""
        return 1, min(2, super().merges_of_sequence(seq_length)[1])


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
