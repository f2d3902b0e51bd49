"""The options of the systems that route whole segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.selection import Selection
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


def refuse_own_documents(selection: Selection, config: Config) -> None:
    """Raise InputError for --reset-attention-mask, which the means of tokens would not respect."""
    if config.training.reset_attention_mask:
        raise InputError(
            f"--reset-attention-mask is true, but --expert-selection {selection.system} routes by "
            "the mean of tokens that may belong to several documents, so they would still see "
            "each other: leave it out"
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
