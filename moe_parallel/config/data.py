"""The options of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import shown
from moe_parallel.config.option import number, option
from moe_parallel.config.section import Section
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

EMBEDDED_VOCAB_SIZE = 4096  # of the embedded corpus, without --vocab-size
_PART_AT_MOST = 1_000_000


@dataclass(frozen=True)
class DataConfig(Section):
    """What the model reads. Without --data-path: the text of the Python installation."""

    data_path: tuple[str, ...] | None = option(
        None,
        "indexed datasets (prefix of .bin/.idx) in Megatron's blend syntax: one prefix, or "
        "weight prefix weight prefix ...; none: the embedded corpus, the text of the Python "
        "installation",
    )
    split: str = option(
        "969,30,1",
        "proportions of --data-path for training, validation and test; their documents are drawn "
        "with a fixed seed, the same in every run",
    )
    tokenizer_type: str = option(
        "ByteLevelBPE", "ByteLevelBPE, HuggingFaceTokenizer or SentencePieceTokenizer"
    )
    tokenizer_model: str | None = option(
        None, "file, folder or hub name of the tokenizer; none: train one on the embedded corpus"
    )
    vocab_size: int | None = option(
        None,
        "vocabulary size; none: the tokenizer's (4096 for the embedded corpus)",
        least=1,
    )
    data_cache_path: str = option(
        "runs/corpus", "folder in which the embedded corpus and the dataset indices are built once"
    )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        _check_split(self.split)


def _check_split(split: str) -> None:
    parts = [number(part.strip()) for part in split.split(",")]
    valid = all(part is not None and 0 <= part <= _PART_AT_MOST for part in parts)
    if not (valid and len(parts) <= 3 and parts[0]):
        raise InputError(
            f"--split is {shown(split)}: it takes up to three parts such as 969,30,1, none of them "
            "negative and the first above 0"
        )
