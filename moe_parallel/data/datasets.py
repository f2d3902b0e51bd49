"""Training and validation data through Megatron-Core's GPTDataset and BlendedDataset.

Every rank builds the datasets, which are memory maps. Rank 0 goes first and writes the indices (the
document and token at which each sample starts); the other ranks then find them.

The training stream depends only on the sources, --seq-length, --seed and the number of samples. It
depends neither on the layout of the ranks nor on how often training was stopped. As in Megatron,
another number of samples (--train-iters) gives another order.
"""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from moe_parallel.collective_errors import rank_0_first
from moe_parallel.data.index_cache import IndexCache
from moe_parallel.data.indexed import check_indexed
from moe_parallel.data.manifest import read_manifest
from moe_parallel.data.sealed import file_digest
from moe_parallel.data.sources import Source
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The data of a run.

    Attributes:
        train: the blend, with at least the requested number of samples, in the order of training.
        train_domains: the datasets that `train` blends.
        valid: the held-out text of each domain. Every token is a label exactly once, except the
            very first, which no token precedes. The order is shuffled and fixed, so that the first
            n samples are a fair sample. The last sample is padded with masked tokens. A domain
            to which --split gives no validation text is absent.
        warnings: one line each, for the user; rank 0 has all of them.
    """

    train: torch.utils.data.Dataset
    train_domains: dict[str, GPTDataset]
    valid: dict[str, GPTDataset]
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The number of tokens of a source per side; None: --split asks for no validation."""

    train: int
    valid: int | None


def build_datasets(
    sources: Sequence[Source],
    *,
    tokenizer: Tokenizer,
    seq_length: int,
    train_samples: int,
    seed: int,
    cache_folder: Path,
    restart_positions: bool = False,
) -> Datasets:
    """Build the training blend and each domain's validation; called by every rank.

    A sample is a dict of CPU tensors [seq_length]: tokens, labels, position_ids (int64) and
    loss_mask (float32).

    Args:
        sources: the domains; either all or none have weights.
        tokenizer: the tokenizer that wrote the data.
        seq_length: tokens per sample.
        train_samples: samples that training will use, >= 1; text is repeated as needed.
        seed: of the shuffles.
        cache_folder: the folder in which indices are cached.
        restart_positions: whether position_ids begin at 0 in every document, not only in a sample.

    Raises:
        InputError: files as in check_indexed; data of another tokenizer or for another sequence
            length; a sequence longer than the data; an empty split; a cache folder that cannot be
            written.
    """
    # Rank 0 scans the token ids; the others read the ranges that it recorded.
    sizes = rank_0_first(lambda: [_check_source(each, tokenizer, seq_length) for each in sources])
    weights = _weights(sources, sizes)
    # 0.5% more than the share, as in Megatron, because a blend of complete samples overshoots.
    shares = [1 + math.ceil(1.005 * weight * train_samples) for weight in weights]
    key = _cache_key(sources, tokenizer, seq_length, shares, seed)
    train_domains: dict[str, GPTDataset] = {}
    valid: dict[str, GPTDataset] = {}
    cache = IndexCache(cache_folder / f"indices-{key}")
    with cache.opened():
        for source, share, size in zip(sources, shares, sizes, strict=True):
            config = _config(source, tokenizer, seq_length, seed, cache.folder, restart_positions)
            builder = BlendedMegatronDatasetBuilder(
                GPTDataset, [share, None, None], lambda: True, config
            )
            train_side, valid_side, _ = builder.build()
            train_domains[source.domain] = train_side
            if size.valid is not None:
                # Megatron would use the first sample's loss mask for all others. If the padded
                # last sample were read first, its padding would be masked in every sample.
                valid_side.masks_and_position_ids_are_cacheable = False
                valid[source.domain] = valid_side
    warnings = [each for each in (cache.warning, _unchecked(sources)) if each is not None]
    blend = _blend(train_domains, weights, train_samples, config)
    return Datasets(blend, train_domains, valid, tuple(warnings))


def texts(dataset: GPTDataset, tokenizer: Tokenizer) -> Iterator[str]:
    """The text of each document of a dataset, once, in the order of the file."""
    for i in dataset.indices:
        ids = dataset.dataset[int(i)]
        yield tokenizer.detokenize(ids[ids != tokenizer.eod].tolist())


def _check_source(source: Source, tokenizer: Tokenizer, seq_length: int) -> _Sizes:
    for prefix in (source.train_prefix, source.valid_prefix):
        check_tokenizer(prefix, tokenizer)
        _check_length(prefix, seq_length)
    sizes = _sizes(source, tokenizer)
    if sizes.train < seq_length + 1:
        raise InputError(
            f"--seq-length {seq_length} is longer than the data: a sample takes {seq_length + 1} "
            f"tokens and the training part of {source.train_prefix} has {sizes.train}; "
            "use a shorter sequence, more text, or another --split"
        )
    if sizes.valid is not None and sizes.valid < 2:
        raise InputError(
            f"the validation part of {source.valid_prefix} is empty ({sizes.valid} tokens): give "
            "more documents, or raise the second number of --split (0: no validation)"
        )
    return sizes


def check_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    """Raise InputError if the manifest of PREFIX, where there is one, names another tokenizer."""
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.tokenizer not in (None, tokenizer.fingerprint):
        raise InputError(
            f"--data-path {prefix} was written with another tokenizer than this run's, by their "
            f"fingerprints {_short(manifest.tokenizer)} and {_short(tokenizer.fingerprint)}: give "
            "the tokenizer that wrote it (--tokenizer-model), or write it again with this one"
        )


def _check_length(prefix: str, seq_length: int) -> None:
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.seq_length not in (None, seq_length):
        raise InputError(
            f"--data-path {prefix} was ordered for --seq-length {manifest.seq_length}, and "
            f"--seq-length is {seq_length}: instances would not match; order it again for "
            "this length (tools/order_by_similarity.py)"
        )


def _short(fingerprint: str | None) -> str:
    return str(fingerprint)[:12]


def _unchecked(sources: Sequence[Source]) -> str | None:
    """A warning that names the sources without a manifest, whose content cannot be checked."""
    prefixes = [each.train_prefix for each in sources if read_manifest(each.train_prefix) is None]
    if not prefixes:
        return None
    return (
        f"no manifest next to {', '.join(prefixes)} (Megatron writes none): whether the content is "
        "what was written, and this run's tokenizer the one that wrote it, is not checked"
    )


def _sizes(source: Source, tokenizer: Tokenizer) -> _Sizes:
    lengths = check_indexed(source.train_prefix, tokenizer.vocab_size)
    if source.split is None:
        valid_lengths = check_indexed(source.valid_prefix, tokenizer.vocab_size)
        return _Sizes(int(lengths.sum(dtype=int)), int(valid_lengths.sum(dtype=int)))
    train, valid, _ = convert_split_vector_to_split_matrix(parse_and_normalize_split(source.split))
    return _Sizes(_tokens(lengths, train), None if valid is None else _tokens(lengths, valid))


def _tokens(lengths: np.ndarray, part: tuple[float, float]) -> int:
    """The number of tokens in a part of the file, cut as Megatron cuts it."""
    first, last = (round(fraction * len(lengths)) for fraction in part)
    return int(lengths[first:last].sum(dtype=int))


def _weights(sources: Sequence[Source], sizes: Sequence[_Sizes]) -> list[float]:
    """Shares of the training blend, adding up to 1."""
    given = [
        float(size.train) if source.weight is None else source.weight
        for source, size in zip(sources, sizes, strict=True)
    ]
    return [weight / sum(given) for weight in given]


def _blend(
    domains: dict[str, GPTDataset], weights: list[float], samples: int, config: GPTDatasetConfig
) -> torch.utils.data.Dataset:
    if len(domains) == 1:
        return next(iter(domains.values()))
    # Every rank can compute it quickly. Megatron-Core 0.16.1 cannot cache it without
    # torch.distributed and warns about that; here the lack of a cache is intended.
    uncached = dataclasses.replace(config, path_to_cache=None)
    logger = logging.getLogger(BlendedDataset.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return BlendedDataset(list(domains.values()), weights, samples, uncached)
    finally:
        logger.setLevel(level)


def _config(
    source: Source,
    tokenizer: Tokenizer,
    seq_length: int,
    seed: int,
    cache: Path,
    restart_positions: bool,
) -> GPTDatasetConfig:
    where: dict[str, Any]
    if source.split is None:
        where = {
            "blend_per_split": [([source.train_prefix], None), ([source.valid_prefix], None), None]
        }
    else:
        where = {"blend": ([source.train_prefix], None), "split": source.split}
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=restart_positions,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
        **where,
    )
    if config.split_matrix is not None:
        config.split_matrix = [*config.split_matrix[:2], None]  # the test part is never read
    return config


def _cache_key(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    seq_length: int,
    shares: Sequence[int],
    seed: int,
) -> str:
    """Digest of everything that the indices depend on.

    Megatron names its cached indices by the path of the data. If the data under that path were
    rewritten, the old indices would be used silently, so the digest includes the .idx content.
    """
    digest = hashlib.sha256()
    for source in sources:
        for prefix in (source.train_prefix, source.valid_prefix):
            digest.update(file_digest(Path(f"{prefix}.idx")).encode())
    settings = [
        [dataclasses.astuple(source) for source in sources],
        tokenizer.fingerprint,
        seq_length,
        list(shares),
        seed,
    ]
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()[:16]
