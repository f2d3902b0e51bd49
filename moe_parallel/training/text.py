"""The tokenizer and the data of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_parallel.config import Config, DataConfig
from moe_parallel.config.option import flag
from moe_parallel.data.datasets import Datasets, build_datasets
from moe_parallel.data.default_corpus import prepare_default_corpus
from moe_parallel.data.sources import Source, blend_sources, corpus_sources
from moe_parallel.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from moe_parallel.errors import InputError

DEFAULT_VOCAB_SIZE = 4096


@dataclass(frozen=True)
class Text:
    """What a run reads, and how it is cut into tokens."""

    tokenizer: Tokenizer
    sources: list[Source]
    vocab_size: int  # of the model: the tokenizer's, or more

    def datasets(self, config: Config) -> Datasets:
        """Training and validation data; called by every rank."""
        training = config.training
        return build_datasets(
            self.sources,
            tokenizer=self.tokenizer,
            seq_length=training.seq_length,
            train_samples=training.train_iters * training.global_batch_size,
            seed=training.seed,
            cache_folder=Path(config.data.data_cache_path),
        )

    def bytes_per_token(self, device: torch.device) -> torch.Tensor:
        """UTF-8 bytes of each token: int64 [V]; 0 for tokens that no tokenizer makes."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        sizes[: self.tokenizer.vocab_size] = self.tokenizer.bytes_per_token
        return torch.from_numpy(sizes).to(device)


def open_text(config: Config) -> Text:
    """The embedded corpus, built where it is missing, or what --data-path names.

    Any number of processes may call this at once. Raises InputError.
    """
    data = config.data
    if data.data_path is None:
        default = DataConfig()
        for name in ("tokenizer_type", "tokenizer_model", "split"):
            if getattr(data, name) != getattr(default, name):
                raise InputError(
                    f"{flag(name)} {getattr(data, name)} comes with --data-path; the embedded "
                    "corpus has a tokenizer of its own (its size: --vocab-size) and a split"
                )
        corpus = prepare_default_corpus(
            Path(data.data_cache_path), data.vocab_size or DEFAULT_VOCAB_SIZE
        )
        tokenizer = load_tokenizer(corpus.tokenizer_folder)
        sources = corpus_sources(corpus)
        return Text(tokenizer, sources, tokenizer.vocab_size)
    sources = blend_sources(data.data_path, data.split)
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    vocab_size = data.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"--vocab-size is {vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens: "
            f"give at least {tokenizer.vocab_size} or leave the flag out"
        )
    return Text(tokenizer, sources, vocab_size)
