"""The text of a run: its tokenizer, its data, and the stream of samples in which a position counts.

A run that continues uses the tokenizer that each of its checkpoints has a copy of. The path in
config.yaml is where the tokenizer was when the run started. A different one of the same size may be
there now, with which the weights are meaningless, or the run folder has moved.

A checkpoint records its stream as `stream`:

made_of   by flag, what its order depends on. The files of --data-path count by their content, so
          they may be moved
first     the samples that the run had consumed before it began; 0 except after --override-data
ends      the numbers of samples that it was built for: at the first start, and by each extension
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_parallel.collective_errors import agree
from moe_parallel.config import Config, DataConfig, read_yaml
from moe_parallel.config.message import flag
from moe_parallel.config.run import EMBEDDED_VOCAB_SIZE
from moe_parallel.data.corpus import DefaultCorpus, corpus_sources, prepare_default_corpus
from moe_parallel.data.datasets import (
    Datasets,
    Source,
    blend_sources,
    build_datasets,
)
from moe_parallel.data.indexed import check_indexed, read_manifest
from moe_parallel.data.sealed import file_digest
from moe_parallel.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.record import read_record

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


def open_text(config: Config) -> Text:
    """The embedded corpus, built if it is missing, or the data that --data-path names.

    A run that continues from --load uses the tokenizer in that checkpoint. Any number of processes
    may call this at once. Raises InputError.
    """
    data = config.data
    own = own_tokenizer(config.checkpoint.load, data)
    if data.data_path is None:
        corpus, asked = _corpus(data), data.vocab_size or EMBEDDED_VOCAB_SIZE
        tokenizer = load_tokenizer(corpus.tokenizer_folder)
        if own is not None and own.fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"the embedded corpus in {corpus.folder} has another tokenizer than --load was "
                "trained with (another Python made it): give the --data-cache-path of that run, or "
                "--data-path"
            )
        warnings: tuple[str, ...] = ()
        if tokenizer.vocab_size < asked:
            warnings = (
                f"--vocab-size {asked}: the embedded corpus has no more pairs to merge than make "
                f"{tokenizer.vocab_size} tokens, and that is the vocabulary",
            )
        return Text(tokenizer, corpus_sources(corpus), tokenizer.vocab_size, warnings)
    sources = blend_sources(data.data_path, data.split)
    tokenizer = _named(data) if own is None else own
    vocab_size = data.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"--vocab-size is {vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens: "
            f"give at least {tokenizer.vocab_size} or leave the flag out"
        )
    return Text(tokenizer, sources, vocab_size)


def open_tokenizer(config: Config) -> Tokenizer:
    """Only the tokenizer; with --load the checkpoint's, without any data. Raises InputError."""
    own = own_tokenizer(config.checkpoint.load, config.data)
    return open_text(config).tokenizer if own is None else own


def token_counts(samples: Any, vocab_size: int) -> list[int]:
    """The number of times that each id occurs in at most about MOST_COUNTED tokens of the samples.

    Args:
        samples: a sequence of dicts of tensors, all of one length; `tokens` has the ids.
        vocab_size: the number of ids.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    tokens = len(samples) * len(samples[0]["tokens"])
    for number in range(0, len(samples), math.ceil(tokens / MOST_COUNTED)):
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


# The key of the tokenizer's fingerprint in a checkpoint's record.
TOKENIZER = "tokenizer"


def own_tokenizer(load: str | None, data: DataConfig) -> Tokenizer | None:
    """The tokenizer that the checkpoint of `--load` was trained with: the copy in it.

    Args:
        load: a run or one of its checkpoints; None: there is none.
        data: the configuration, which may name a tokenizer.

    Returns None without --load, and for a checkpoint without a tokenizer.

    Raises:
        InputError: the copy is damaged or was exchanged; or the configuration names another
            tokenizer than the checkpoint's config.yaml, and it is a different one.
    """
    if load is None:
        return None
    checkpoint = find_checkpoint(Path(load))
    folder = checkpoint / "tokenizer"
    recorded = read_record(checkpoint)["fingerprint"].get(TOKENIZER)
    if recorded is None and not folder.is_dir():
        return None
    try:
        tokenizer = load_tokenizer(folder)
    except InputError as error:
        raise InputError(f"--load {checkpoint}: its tokenizer cannot be used: {error}") from None
    if recorded not in (None, tokenizer.fingerprint):
        raise InputError(
            f"--load {checkpoint}: {folder} is not the tokenizer that the weights were trained "
            "with (damaged, or another one): restore it, or load another checkpoint"
        )
    default, file = DataConfig(), checkpoint / "config.yaml"
    saved = read_yaml(file) if file.is_file() else {}
    named = {each: getattr(data, each) for each in ("tokenizer_type", "tokenizer_model")}
    named = {each: value for each, value in named.items() if value != getattr(default, each)}
    is_other = any(value != saved.get(each) for each, value in named.items())
    if is_other and _named(data).fingerprint != tokenizer.fingerprint:
        words = " ".join(f"{flag(each)} {value}" for each, value in named.items())
        raise InputError(
            f"{words} is not the tokenizer that --load {checkpoint} was trained with: "
            "remove it to use the run's own copy"
        )
    return tokenizer


@dataclass(frozen=True)
class Stream:
    """See the top of this file."""

    made_of: Mapping[str, Any]
    first: int
    ends: tuple[int, ...]


def open_stream(config: Config, sources: Sequence[Source]) -> tuple[Stream, list[str]]:
    """The stream of a run that starts, or of the run that continues from --load, and warnings.

    A continued run extends its stream if it needs more samples. Upcycling of another run's dense
    model continues in its stream if the data are the same, and else begins one. Collective.

    Raises InputError for other data without --override-data.
    """
    training, checkpoint = config.training, config.checkpoint
    made_of = agree(lambda: _made_of(config, sources))
    size = training.global_batch_size
    fresh = Stream(made_of, 0, (training.train_iters * size,))
    if checkpoint.load is None:
        return fresh, []
    load = Path(checkpoint.load)
    record = agree(lambda: read_record(find_checkpoint(load)))
    done, before = record["training"], record.get("stream")
    if before is None:  # an import or a conversion has read nothing
        return fresh, []
    differing = {
        flag: f"{flag} is {_shown(known)} in the checkpoint and {_shown(made_of[flag])} here"
        for flag, known in before["made_of"].items()
        if flag in made_of and not _equal(known, made_of[flag])
    }
    warnings = []
    files, before_files = (
        {each["idx"] for each in data["--data-path"]} for data in (made_of, before["made_of"])
    )
    if "--split" in differing and files & before_files:
        warnings = [
            f"--load {load}: {differing['--split']}: text that is held out here may be text that "
            "it was trained on"
        ]
    if training.skip_train or checkpoint.finetune:
        return fresh, warnings
    rest = max(0, training.train_iters - done["iteration"]) * size
    upcycles = config.moe.moe_use_upcycling and record["fingerprint"].get("--num-experts") is None
    if differing and not (checkpoint.override_data or upcycles):
        raise InputError(
            f"--load {load}: {', '.join(differing.values())}; its position would be one in other "
            "samples: use the values of its config.yaml, or go on with the first sample of the "
            "data given here by --override-data"
        )
    if differing:
        return Stream(made_of, done["consumed_samples"], (max(1, rest),)), warnings
    ends, end = tuple(before["ends"]), done["consumed_samples"] - before["first"] + rest
    return Stream(made_of, before["first"], (*ends, end) if end > ends[-1] else ends), []


def _made_of(config: Config, sources: Sequence[Source]) -> dict[str, Any]:
    weights = [source.weight for source in sources if source.weight is not None]
    return {
        "--seed": config.training.seed,
        "--seq-length": config.training.seq_length,
        "--split": sources[0].split,
        "--data-path": [
            {
                "name": Path(source.train_prefix).name,
                "weight": None if source.weight is None else source.weight / sum(weights),
                **_digests(source.train_prefix),
            }
            for source in sources
        ],
    }


def _digests(prefix: str) -> dict[str, str | None]:
    """Of the index, and of the token ids if there is a manifest."""
    manifest = read_manifest(prefix)
    if manifest is not None:
        return {"idx": manifest.idx_sha256, "bin": manifest.bin_sha256}
    try:
        return {"idx": file_digest(Path(f"{prefix}.idx")), "bin": None}
    except OSError:
        check_indexed(prefix, vocab_size=1)  # says what is wrong
        raise


def _equal(before: Any, here: Any) -> bool:
    if not isinstance(here, list):
        return bool(before == here)
    return len(before) == len(here) and all(
        (a["weight"], a["idx"]) == (b["weight"], b["idx"])
        and (a["bin"] == b["bin"] or None in (a["bin"], b["bin"]))
        for a, b in zip(before, here, strict=True)
    )


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return " ".join(
        f"{'' if each['weight'] is None else format(each['weight'], 'g') + ' '}{each['name']} "
        f"({(each['bin'] or each['idx'])[:12]})"
        for each in value
    )
