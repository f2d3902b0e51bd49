"""Systems that merge the experts before these compute, and those that route whole segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moe_parallel.config.option import option
from moe_parallel.config.selection.selection import Selection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


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
class Segments(Selection):
    """Sequences are split into segments, and all tokens of a segment are routed together."""

    lory_segment_length: int = option(256, "number of tokens per segment (T_s)", least=1)

    @property
    def first_part(self) -> int:
        return self.lory_segment_length

    @property
    def settled_after(self) -> int | None:
        """The first segment, whose tokens see its mean; later ones see only complete segments."""
        return self.lory_segment_length

    @property
    def by_sequence(self) -> bool:
        return True

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        refuse_own_documents(self, config)
        length, seq_length = self.lory_segment_length, config.training.seq_length
        if length > seq_length:
            raise InputError(
                f"--lory-segment-length is {length}, above --seq-length {seq_length}: choose at "
                f"most {seq_length}"
            )


def refuse_own_documents(selection: Selection, config: Config) -> None:
    """Raise InputError for --reset-attention-mask, which the means of tokens would not respect."""
    if config.training.reset_attention_mask:
        raise InputError(
            f"--reset-attention-mask is true, but --expert-selection {selection.system} routes by "
            "the mean of tokens that may belong to several documents, so they would still see "
            "each other: leave it out"
        )
