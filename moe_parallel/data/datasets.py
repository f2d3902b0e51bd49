"""Training and validation data from the sources of --data-path, through Megatron-Core's GPTDataset.

Every rank builds the datasets, which are memory maps. Rank 0 goes first and writes the indices (the
document and token at which each sample starts); the other ranks then find them.

The training stream depends only on the sources, --seq-length, --seed and the number of samples. It
depends neither on the layout of the ranks nor on how often training was stopped. As in Megatron,
another number of samples (--train-iters) gives another order, but a stream can be extended: all its
samples keep their places, and those that follow first complete the epochs that were begun.

Held-out samples and their order depend on the sources and --seq-length alone.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split, normalize
from torch.utils.data import ConcatDataset, Dataset, Subset

from moe_parallel.collective_errors import rank_0_first
from moe_parallel.data.atomic_files import locked, remove
from moe_parallel.data.indexed import check_indexed, read_manifest
from moe_parallel.data.sealed import file_digest, read_sealed, write_sealed
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError


@dataclasses.dataclass(frozen=True)
class Source:
    """One domain's text.

    Attributes:
        domain: name under which its validation is reported.
        weight: share in the training blend, up to a common factor; None: proportional to tokens.
        train_prefix: indexed dataset (path without .bin or .idx) of the training text.
        valid_prefix: indexed dataset of the validation text; the same if `split` divides it.
        split: proportions of one file for training, validation and test, "969,30,1" in
            plain decimals; None: two files.
    """

    domain: str
    weight: float | None
    train_prefix: str
    valid_prefix: str
    split: str | None


def blend_sources(data_path: Sequence[str], split: str) -> list[Source]:
    """Read --data-path: one prefix, prefixes, or weight prefix weight prefix ...

    Each prefix is a domain, named after the last part of its path (with a number if it repeats).

    Args:
        data_path: the words of the flag.
        split: up to three numbers, as config.validate accepts them.

    Raises:
        InputError: weights that are missing, not numbers, or not positive.
    """
    words = [word.strip() for word in data_path]
    if not words:
        raise InputError("--data-path is empty: give the prefix of a .bin/.idx pair")
    prefixes, weights = words, list[float | None]([None] * len(words))
    # As in Megatron: every second word is a weight, or none is.
    if len(words) > 1 and any(_number(word) is not None for word in words):
        if len(words) % 2:
            raise InputError(
                f"--data-path {' '.join(words)}: a weight or a prefix is missing; "
                "give weight prefix weight prefix ..."
            )
        prefixes, weights = words[1::2], [_number(word) for word in words[::2]]
        for word, weight, prefix in zip(words[::2], weights, prefixes, strict=True):
            if weight is None or weight <= 0:
                raise InputError(
                    f"--data-path: the weight {word!r} of {prefix} is not a number above 0; "
                    "give weight prefix weight prefix ..."
                )
    names: list[str] = []
    for prefix in prefixes:
        name, count = Path(prefix).name, 1
        while name in names:
            count += 1
            name = f"{Path(prefix).name}_{count}"
        names.append(name)
    # Plain decimals, because Megatron would read 1e2 as 1, 2.
    plain = [np.format_float_positional(float(part), trim="-") for part in split.split(",")]
    return [
        Source(name, weight, prefix, prefix, ",".join(plain))
        for name, weight, prefix in zip(names, weights, prefixes, strict=True)
    ]


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The data of a run.

    Attributes:
        train: the blend, with at least the requested number of samples, in the order of training.
        train_domains: the datasets that `train` blends, without extensions.
        valid: the held-out text of each domain. Every token is a label exactly once, except the
            very first, which no token precedes. The order is shuffled and fixed, so that the first
            n samples are a fair sample. The last sample is padded with masked tokens. A domain
            to which --split gives no validation text is absent.
        warnings: one line each, for the user; rank 0 has all of them.
        first: the samples that the run had consumed before those of `train`.
    """

    train: Dataset
    train_domains: dict[str, GPTDataset]
    valid: dict[str, GPTDataset]
    warnings: tuple[str, ...] = ()
    first: int = 0


#: Of the division by --split and the order of held-out samples, whatever --seed is.
_SEED_OF_SIDES = 1234


@dataclasses.dataclass(frozen=True)
class _Part:
    """The part of a file that one side of a source reads: its sequences, int32, ascending."""

    prefix: str
    file: IndexedDataset
    sequences_N: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.file.sequence_lengths[self.sequences_N].sum(dtype=int))


def build_datasets(
    sources: Sequence[Source],
    *,
    tokenizer: Tokenizer,
    seq_length: int,
    train_samples: int,
    seed: int,
    cache_folder: Path,
    restart_positions: bool = False,
    extends: Sequence[int] = (),
) -> Datasets:
    """Build the training blend and each domain's validation; called by every rank.

    A sample is a dict of CPU tensors [seq_length]: tokens, labels, position_ids (int64) and
    loss_mask (float32).

    Args:
        sources: the domains; either all or none have weights.
        tokenizer: the tokenizer that wrote the data.
        seq_length: tokens per sample.
        train_samples: samples that training will use, >= 1; text is repeated as needed.
        seed: of the shuffles of the training text.
        cache_folder: the folder in which indices are cached.
        restart_positions: whether position_ids begin at 0 in every document, not only in a sample.
        extends: the smaller numbers of samples for which the stream was built before, ascending.

    Raises:
        InputError: files as in check_indexed; data of another tokenizer or for another sequence
            length; a sequence longer than the data; an empty split; a cache folder that cannot be
            written.
    """
    # Rank 0 scans the token ids; the others read the ranges that it recorded.
    parts = rank_0_first(lambda: [_check_source(each, tokenizer, seq_length) for each in sources])
    weights = _weights(sources, [train.tokens for train, _ in parts])
    # 0.5% more than the share, as in Megatron, because a blend of complete samples overshoots.
    shares = [
        [1 + math.ceil(1.005 * weight * end) for end in (*extends, train_samples)]
        for weight in weights
    ]
    key = _cache_key(sources, tokenizer, seq_length, shares, seed)
    cache = cache_folder / f"indices-{key}"
    warnings: list[str] = []

    def dataset(part: _Part, side: Split, samples: int | None, seed: int) -> GPTDataset:
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
            blend=([part.prefix], None),
            split="1",  # of the sequences of the part
        )
        return GPTDataset(part.file, part.prefix, part.sequences_N, samples, side, config)

    def extended(part: _Part, ends: Sequence[int]) -> list[GPTDataset]:
        """One dataset for each end that those before do not reach. Each has whole epochs."""
        found: list[GPTDataset] = []
        for end in ends:
            missing = end - sum(map(len, found))
            if missing > 0:
                found.append(dataset(part, Split.train, missing, (seed + len(found)) % 2**32))
        return found

    @functools.cache  # rank 0 is asked twice
    def build() -> tuple[list[list[GPTDataset]], dict[str, GPTDataset]]:
        with index_cache(cache, warnings):
            return [
                extended(train, ends) for (train, _), ends in zip(parts, shares, strict=True)
            ], {
                source.domain: dataset(valid, Split.valid, None, _SEED_OF_SIDES)
                for source, (_, valid) in zip(sources, parts, strict=True)
                if valid is not None
            }

    train, valid = rank_0_first(build)
    for each in valid.values():
        # Megatron would use the first sample's loss mask for all others. If the padded last sample
        # were read first, its padding would be masked in every sample.
        each.masks_and_position_ids_are_cacheable = False
    unknown = [each.train_prefix for each in sources if read_manifest(each.train_prefix) is None]
    if unknown:
        warnings.append(
            f"no manifest next to {', '.join(unknown)} (Megatron writes none): whether the content "
            "is what was written, and this run's tokenizer the one that wrote it, is not checked"
        )
    names = [source.domain for source in sources]
    firsts = {name: legs[0] for name, legs in zip(names, train, strict=True)}
    return Datasets(_blend(train, weights, train_samples), firsts, valid, tuple(warnings))


def texts(dataset: GPTDataset, tokenizer: Tokenizer) -> Iterator[str]:
    """The text of each document of a dataset, once, in the order of the file."""
    for i in dataset.indices:
        ids = dataset.dataset[int(i)]
        yield tokenizer.detokenize(ids[ids != tokenizer.eod].tolist())


def held_out_documents(source: Source, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each document in the validation part of a source, without its end.

    They are those of `Datasets.valid`, in the order of the file. An empty document is left out.

    Raises InputError for data of another tokenizer, and for files as in check_indexed.
    """
    _check_origin(source.valid_prefix, tokenizer, None)
    check_indexed(source.valid_prefix, tokenizer.vocab_size)
    dataset = IndexedDataset(source.valid_prefix)
    chosen_D = documents_of(source, len(dataset.document_indices) - 1)[-1]
    for number in () if chosen_D is None else np.flatnonzero(chosen_D):
        first, last = dataset.document_indices[number : number + 2]
        ids = np.concatenate([dataset[i] for i in range(first, last)])
        ids = ids[ids != tokenizer.eod]
        if len(ids):
            yield ids.tolist()


def documents_of(source: Source, documents: int) -> list[np.ndarray | None]:
    """bool [documents]: those of each side (training, validation) in a file of `documents`.

    All are of one side, unless --split divides the file. None: it gives that side none. The sides
    have Megatron's sizes. Their documents are drawn with a fixed seed, because files are often
    sorted: their last tenth may be text of one kind.
    """
    if source.split is None:
        return [np.ones(documents, dtype=bool)]
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(source.split))
    order = np.random.RandomState(_SEED_OF_SIDES).permutation(np.arange(documents, dtype=np.int32))

    def chosen(part: tuple[float, float] | None) -> np.ndarray | None:
        if part is None:
            return None
        first, last = (round(fraction * documents) for fraction in part)
        chosen_D = np.zeros(documents, dtype=bool)
        chosen_D[order[first:last]] = True
        return chosen_D

    return [chosen(part) for part in matrix[:2]]


def _check_source(
    source: Source, tokenizer: Tokenizer, seq_length: int
) -> tuple[_Part, _Part | None]:
    for prefix in dict.fromkeys((source.train_prefix, source.valid_prefix)):
        _check_origin(prefix, tokenizer, seq_length)
        check_indexed(prefix, tokenizer.vocab_size)
    train, valid = _parts(source)
    assert train is not None  # see config.validate
    if train.tokens < seq_length + 1:
        raise InputError(
            f"--seq-length {seq_length} is longer than the data: a sample takes {seq_length + 1} "
            f"tokens and the training part of {source.train_prefix} has {train.tokens}; "
            "use a shorter sequence, more text, or another --split"
        )
    if valid is not None and valid.tokens < 2:
        raise InputError(
            f"the validation part of {source.valid_prefix} is empty ({valid.tokens} tokens): give "
            "more documents, or raise the second number of --split (0: no validation)"
        )
    return train, valid


def _parts(source: Source) -> list[_Part | None]:
    """Those of training and validation. A file that --split divides is opened once."""
    parts: list[_Part | None] = []
    for prefix in dict.fromkeys((source.train_prefix, source.valid_prefix)):
        file = IndexedDataset(prefix)
        sizes_D = np.diff(file.document_indices)  # Megatron's documents may have several sequences
        for chosen_D in documents_of(source, len(sizes_D)):
            if chosen_D is None:
                parts.append(None)
            else:
                sequences_N = np.flatnonzero(np.repeat(chosen_D, sizes_D)).astype(np.int32)
                parts.append(_Part(prefix, file, sequences_N))
    return parts


def _check_origin(prefix: str, tokenizer: Tokenizer, seq_length: int | None) -> None:
    """Raise InputError if the manifest of PREFIX, where there is one, names another tokenizer, or
    another sequence length, for which similar documents were joined."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    if manifest.tokenizer not in (None, tokenizer.fingerprint):
        raise InputError(
            f"--data-path {prefix} was written with another tokenizer than this run's, by their "
            f"fingerprints {manifest.tokenizer[:12]} and {tokenizer.fingerprint[:12]}: give "
            "the tokenizer that wrote it (--tokenizer-model), or write it again with this one"
        )
    if None not in (seq_length, manifest.seq_length) and seq_length != manifest.seq_length:
        raise InputError(
            f"--data-path {prefix} was ordered for --seq-length {manifest.seq_length}, and "
            f"--seq-length is {seq_length}: instances would not match; order it again for "
            "this length (tools/order_by_similarity.py)"
        )


def _weights(sources: Sequence[Source], tokens: Sequence[int]) -> list[float]:
    """Shares of the training blend, adding up to 1."""
    given = [
        float(number) if source.weight is None else source.weight
        for source, number in zip(sources, tokens, strict=True)
    ]
    return [weight / sum(given) for weight in given]


def _blend(train: list[list[GPTDataset]], weights: list[float], samples: int) -> Dataset:
    """The samples of all domains, each from the one that is furthest behind its weight.

    Megatron's BlendedDataset, whose domains cannot have extensions.
    """
    sizes = np.array([sum(map(len, legs)) for legs in train])
    joined: Dataset = ConcatDataset([leg for legs in train for leg in legs])
    if len(train) == 1:
        return joined
    domain_N = np.zeros(samples, dtype=np.int16)
    sample_N = np.zeros(samples, dtype=np.int64)
    build_blending_indices(domain_N, sample_N, normalize(weights), len(train), samples, False)
    assert (np.bincount(domain_N, minlength=len(sizes)) <= sizes).all()
    return Subset(joined, (np.cumsum(sizes) - sizes)[domain_N] + sample_N)


def _cache_key(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    seq_length: int,
    shares: Sequence[Sequence[int]],
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
        shares,
        seed,
        "sides drawn by documents",  # earlier versions cut a file in two
    ]
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()[:16]


@contextmanager
def index_cache(folder: Path, warnings: list[str]) -> Iterator[None]:
    """Megatron may write indices to the folder in this context, and find them.

    Called by every rank. Megatron-Core names these files by what they are computed from. It accepts
    incomplete and edited files, and reads them with numpy's `allow_pickle=True`, so a file that is
    a pickle could execute code. Here `complete.json`, written last, lists the files with their
    checksums, and rank 0 compares them before any rank reads. They depend on the data only: a
    folder that fails the comparison is rebuilt, with the same bytes. The other ranks need no lock:
    they read after rank 0 has built.

    Args:
        folder: of the indices.
        warnings: on rank 0, gets what was wrong with the earlier content.

    Raises:
        InputError: the folder cannot be written, or a file of the data cannot be read.
    """
    record = folder / "complete.json"
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        with ExitStack() as lock:
            whole = True
            if first:
                lock.enter_context(locked(folder.with_name(f"{folder.name}.lock")))
                found = record.is_file()  # else never built, or its build was killed
                whole = found and _is_whole(record)
                if not whole:
                    remove(folder)
                if found and not whole:
                    warnings.append(f"the indices in {folder} were damaged: they are built again")
            yield
            if not whole:
                folder.mkdir(exist_ok=True)
                write_sealed(record, {"files": _files_beside(record)})
    except OSError as error:
        reason = error.strerror or error  # numpy's, about an array written in part, has only a text
        if first:
            raise InputError(
                f"--data-cache-path {folder.parent} cannot be written ({reason}): "
                "name a folder on a disk with room"
            ) from None
        raise InputError(
            f"{error.filename} cannot be opened ({reason}): every rank reads what --data-path "
            "names, and the --data-cache-path that rank 0 writes"
        ) from None


def _is_whole(record: Path) -> bool:
    """Whether the files are those of the record, and arrays, and no pickles."""
    try:
        if read_sealed(record).get("files") != _files_beside(record):
            return False
        for path in record.parent.glob("*.npy"):
            np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception:  # arbitrary bytes may cause any error
        return False
    return True


def _files_beside(record: Path) -> dict[str, str]:
    """The digest of every other file, by name."""
    others = (path for path in record.parent.iterdir() if path != record)
    return {path.name: file_digest(path) for path in sorted(others)}
