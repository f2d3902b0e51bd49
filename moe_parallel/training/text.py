"""The tokenizer and the data of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_parallel.config import Config, DataConfig
from moe_parallel.config.message import flag
from moe_parallel.config.run import EMBEDDED_VOCAB_SIZE
from moe_parallel.data.corpus import DefaultCorpus, corpus_sources, prepare_default_corpus
from moe_parallel.data.datasets import (
    Datasets,
    Source,
    blend_sources,
    build_datasets,
)
from moe_parallel.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from moe_parallel.errors import InputError
from moe_parallel.training.own_tokenizer import OwnTokenizer, own_tokenizer
from moe_parallel.training.stream import Stream

#: Samples are left out evenly if there are more tokens than this, because frequencies need no more.
MOST_COUNTED = 1 << 22


@dataclass(frozen=True)
class Text:
    """The text sources of a run, and their tokenizer."""

    tokenizer: Tokenizer
    sources: list[Source]
    vocab_size: int  # of the model: the tokenizer's, or more
    warnings: tuple[str, ...] = ()  # one line each, for the user

    def datasets(self, config: Config, stream: Stream | None = None) -> Datasets:
        """Training and validation data; called by every rank. None: the stream of a new run."""
        training = config.training
        *extends, end = (
            [training.train_iters * training.global_batch_size] if stream is None else stream.ends
        )
        datasets = build_datasets(
            self.sources,
            tokenizer=self.tokenizer,
            seq_length=training.seq_length,
            train_samples=end,
            extends=extends,
            seed=training.seed,
            cache_folder=Path(config.data.data_cache_path),
            # A mask needs the documents' beginnings; the positions have no other reader.
            restart_positions=training.reset_position_ids or training.reset_attention_mask,
        )
        return datasets if stream is None else replace(datasets, first=stream.first)

    def token_counts(self, config: Config, datasets: Datasets) -> list[int]:
        """How often each token id occurs in the training data; [] if no system of the run asks."""
        if config.moe.num_experts is None or not config.selection.reads_token_ids:
            return []
        return token_counts(datasets.train, self.vocab_size)

    def bytes_per_token(self, device: torch.device) -> torch.Tensor:
        """UTF-8 bytes of each token: int64 [V]; 0 for ids beyond the tokenizer's vocabulary."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        sizes[: self.tokenizer.vocab_size] = self.tokenizer.bytes_per_token
        return torch.from_numpy(sizes).to(device)


def open_text(config: Config, *, tokenizer_given: bool = False) -> Text:
    """The embedded corpus, built if it is missing, or the data that --data-path names.

    A run that continues from --load uses the tokenizer in that checkpoint.

    Args:
        config: of the run.
        tokenizer_given: whether the command line itself names the tokenizer, not only a file.

    Any number of processes may call this at once. Raises InputError.
    """
    data = config.data
    own = own_tokenizer(config.checkpoint.load, data, given=tokenizer_given)
    warnings = [] if own is None or own.warning is None else [own.warning]
    if data.data_path is None:
        corpus, asked = _corpus(data), data.vocab_size or EMBEDDED_VOCAB_SIZE
        tokenizer = _tokenizer_of(corpus, own)
        if tokenizer.vocab_size < asked:
            warnings.append(
                f"--vocab-size {asked}: the embedded corpus has no more pairs to merge than make "
                f"{tokenizer.vocab_size} tokens, and that is the vocabulary"
            )
        sources = corpus_sources(corpus)
        return Text(tokenizer, sources, tokenizer.vocab_size, tuple(warnings))
    sources = blend_sources(data.data_path, data.split)
    tokenizer = _named(data) if own is None else own.tokenizer
    vocab_size = data.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"--vocab-size is {vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens: "
            f"give at least {tokenizer.vocab_size} or leave the flag out"
        )
    return Text(tokenizer, sources, vocab_size, tuple(warnings))


def open_tokenizer(config: Config) -> Tokenizer:
    """Only the tokenizer; with --load the checkpoint's, without any data. Raises InputError."""
    own = own_tokenizer(config.checkpoint.load, config.data)
    return open_text(config).tokenizer if own is None else own.tokenizer


def token_counts(samples: Any, vocab_size: int, limit: int = MOST_COUNTED) -> list[int]:
    """The number of times that each id occurs in at most about `limit` tokens of the samples.

    Args:
        samples: a sequence of dicts of tensors, all of one length; `tokens` has the ids.
        vocab_size: the number of ids.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    tokens = len(samples) * len(samples[0]["tokens"])
    for number in range(0, len(samples), math.ceil(tokens / limit)):
        counts_V += np.bincount(samples[number]["tokens"].numpy(), minlength=vocab_size)
    return counts_V.tolist()


def _named(data: DataConfig) -> Tokenizer:
    return build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)


def _corpus(data: DataConfig) -> DefaultCorpus:
    default = DataConfig()
    for name in ("tokenizer_type", "tokenizer_model", "split"):
        if getattr(data, name) != getattr(default, name):
            raise InputError(
                f"{flag(name)} {getattr(data, name)} comes with --data-path; the embedded "
                "corpus has a tokenizer of its own (its size: --vocab-size) and a split"
            )
    return prepare_default_corpus(
        Path(data.data_cache_path), data.vocab_size or EMBEDDED_VOCAB_SIZE
    )


def _tokenizer_of(corpus: DefaultCorpus, own: OwnTokenizer | None) -> Tokenizer:
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    if own is not None and own.tokenizer.fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"the embedded corpus in {corpus.folder} has another tokenizer than --load was trained "
            "with (another Python made it): give the --data-cache-path of that run, or --data-path"
        )
    return tokenizer
