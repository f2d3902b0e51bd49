"""What an indexed dataset contains: sizes, lengths, duplicates, samples as text."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_parallel.config.message import counted
from moe_parallel.data.indexed import (
    Manifest,
    ShowProgress,
    check_indexed,
    read_manifest,
    type_of_ids,
)
from moe_parallel.data.sealed import file_digest
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError

# Every id in an indexed dataset that Megatron wrote is below this.
_ANY_VOCABULARY = 2**31

_QUANTILES = (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1)
_BAR = 40
_MOST_SOURCES = 10


class Inspected:
    """A dataset that is complete and fits its manifest and its tokenizer.

    Attributes:
        prefix: path without .bin and .idx.
        manifest: None: it has none.
        lengths_N: int32, tokens of each document.
    """

    def __init__(self, prefix: str, tokenizer: Tokenizer | None) -> None:
        """
        Raises:
            InputError: files as in check_indexed; another tokenizer than the manifest's.
        """
        vocab_size = _ANY_VOCABULARY if tokenizer is None else tokenizer.vocab_size
        self.prefix = prefix
        self.tokenizer = tokenizer
        self.manifest = read_manifest(prefix)
        wrote = None if self.manifest is None else self.manifest.tokenizer
        if tokenizer is not None and wrote not in (None, tokenizer.fingerprint):
            raise InputError(
                f"--data-path {prefix} was written with another tokenizer, by its fingerprint "
                f"{str(wrote)[:12]}, and --tokenizer-model has {tokenizer.fingerprint[:12]}: give "
                "the one that wrote it, or none"
            )
        self.lengths_N = check_indexed(prefix, vocab_size)
        self._ids = np.memmap(f"{prefix}.bin", mode="r", dtype=type_of_ids(prefix))
        self._ends_N = np.cumsum(self.lengths_N, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, i: int) -> np.ndarray:
        """The ids of document i."""
        return self._ids[self._ends_N[i] - self.lengths_N[i] : self._ends_N[i]]

    @property
    def id_type(self) -> str:
        return self._ids.dtype.name

    def last_tokens(self) -> tuple[int, int]:
        """The most frequent last token of the documents, and how many end with it."""
        last = self._ids[self._ends_N[self.lengths_N > 0] - 1]
        ids, counts = np.unique(last, return_counts=True)
        most = int(counts.argmax())
        return int(ids[most]), int(counts[most])

    def digests(self, advance: Callable[[int], object]) -> np.ndarray:
        """uint64 [N]: equal for equal documents, whether or not the most frequent end follows."""
        end, _ = self.last_tokens()
        digests_N = np.empty(len(self), dtype=np.uint64)
        for i, length in enumerate(self.lengths_N.tolist()):
            ids = self[i]
            body = ids[:-1] if length and ids[-1] == end else ids
            digest = hashlib.blake2b(body.astype(np.int32).data, digest_size=8)
            digests_N[i] = int.from_bytes(digest.digest(), "little")
            advance(length)
        return digests_N

    def text(self, i: int, most: int) -> str:
        """The first `most` characters of document i, or of its ids without a tokenizer."""
        ids = self[i][: most + 1]  # a token has a character or more, nearly always
        if self.tokenizer is None:
            text = " ".join(map(str, ids.tolist()))
        else:
            text = self.tokenizer.detokenize(ids.tolist())
        whole = len(ids) == self.lengths_N[i] and len(text) <= most
        return printable(text[:most]) + ("" if whole else " ...")


@dataclass(frozen=True)
class Repeats:
    """Documents that occur more than once.

    Attributes:
        documents: that repeat an earlier one.
        most: how often the most frequent one occurs.
        example: its first position.
    """

    documents: int
    most: int
    example: int


def repeats(digests_N: np.ndarray) -> Repeats:
    """Counts equal digests."""
    _, first, counts = np.unique(digests_N, return_index=True, return_counts=True)
    most = counts.max()
    example = int(first[counts == most].min())
    return Repeats(len(digests_N) - len(counts), int(most), example)


def printable(text: str) -> str:
    """The text with escapes for control characters, which could command a terminal."""
    kept = (
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(kept)


def histogram(lengths_N: np.ndarray) -> list[str]:
    """A line for each power of 2: the range of lengths, the number of documents, a bar."""
    counts = np.bincount(np.frexp(lengths_N.astype(np.float64))[1])
    lines = []
    for power in range(int(np.flatnonzero(counts)[0]), len(counts)):
        shortest, longest = (1 << power) >> 1, (1 << power) - 1
        bar = "#" * int(np.ceil(_BAR * counts[power] / counts.max()))
        lines.append(f"{shortest:>11,} - {longest:<11,}{counts[power]:>13,}  {bar}".rstrip())
    return lines


def changed_sources(data: Inspected) -> list[str]:
    """The sources that are missing or have changed since they were read, with the reason.

    Raises:
        InputError: the dataset does not name its sources.
    """
    if data.manifest is None or data.manifest.sources is None:
        raise InputError(
            f"--check-sources: {data.prefix} has no manifest that names source files; "
            "leave the flag out"
        )
    return [
        f"{source.path} {reason}"
        for source in data.manifest.sources
        if (reason := _difference(Path(source.path), source.bytes, source.sha256))
    ]


def _difference(path: Path, size: int, sha256: str) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found:,} bytes, not {size:,}"
        return None if file_digest(path) == sha256 else "has other content"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


@dataclass(frozen=True)
class Samples:
    """The documents to show: `count` random ones, or those in `chosen`."""

    count: int
    chosen: Sequence[int] | None
    characters: int
    seed: int

    def of(self, data: Inspected) -> list[int]:
        """Raises InputError for a document that does not exist."""
        if self.chosen is None:
            count = min(self.count, len(data))
            random = np.random.default_rng(self.seed)
            return sorted(random.choice(len(data), count, replace=False).tolist())
        for i in self.chosen:
            if not 0 <= i < len(data):
                raise InputError(
                    f"--documents {i}: {data.prefix} has {len(data):,}; give a number from 0 to "
                    f"{len(data) - 1}"
                )
        return list(self.chosen)


def inspected(
    prefixes: Sequence[str], tokenizer: Tokenizer | None, samples: Samples, progress: ShowProgress
) -> Iterator[tuple[Inspected, list[str]]]:
    """Each dataset and the lines of its report.

    Memory holds some tens of bytes per document, and no tokens.

    Raises:
        InputError: see Inspected and Samples.
    """
    before: list[tuple[str, np.ndarray]] = []
    for prefix in prefixes:
        data = Inspected(prefix, tokenizer)
        shown = samples.of(data)
        with progress(f"reading {prefix}", int(data.lengths_N.sum(dtype=np.int64))) as advance:
            digests_N = data.digests(advance)
        report = [*_described(data), *_repeated(digests_N)]
        for other, others_N in before:
            count = int(np.isin(digests_N, others_N).sum())
            share = count / len(data)
            report.append(f"{counted(count, 'document')} ({share:.1%}) also in {other}")
        for i in shown:
            report.append(f"document {i:,}, {data.lengths_N[i]:,} tokens:")
            report += [f"  | {line}" for line in data.text(i, samples.characters).split("\n")]
        before.append((prefix, digests_N))
        yield data, report


def _repeated(digests_N: np.ndarray) -> Iterator[str]:
    found = repeats(digests_N)
    share = found.documents / len(digests_N)
    line = f"{counted(found.documents, 'repeated document')} ({share:.1%})"
    if found.documents:
        line += f"; document {found.example:,} occurs {found.most:,} times"
    yield line


def _described(data: Inspected) -> Iterator[str]:
    """Lines about the whole dataset, without reading its tokens."""
    lengths_N, manifest = data.lengths_N, data.manifest
    tokens = int(lengths_N.sum(dtype=np.int64))
    size = f"{counted(len(data), 'document')}, {counted(tokens, 'token')}"
    yield f"{size} of type {data.id_type}"
    if manifest is None:
        yield "no manifest: the tokenizer, the sources and the domains are unknown"
    else:
        yield from _origin(manifest)
    end, count = data.last_tokens()
    known = data.tokenizer is not None and end == data.tokenizer.eod
    name = ", the end of document" if known else ""
    yield f"last token {end}{name}: {counted(count, 'document')}"
    quantiles = np.quantile(lengths_N, _QUANTILES, method="nearest")
    names = ("shortest", "1%", "25%", "median", "75%", "99%", "longest")
    yield f"tokens per document: mean {tokens / len(data):,.1f}, " + ", ".join(
        f"{name} {length:,}" for name, length in zip(names, quantiles, strict=True)
    )
    yield from histogram(lengths_N)


def _origin(manifest: Manifest) -> Iterator[str]:
    yield f"tokenizer {(manifest.tokenizer or 'unknown')[:12]}" + (
        "" if manifest.seq_length is None else f"; for --seq-length {manifest.seq_length} only"
    )
    if manifest.sources is not None:
        size = sum(source.bytes for source in manifest.sources)
        files = counted(len(manifest.sources), "source file")
        yield f"{files}, {size:,} bytes (SHA-256, bytes, path)"
        for source in manifest.sources[:_MOST_SOURCES]:
            yield f"  {source.sha256[:12]}  {source.bytes:>15,}  {printable(source.path)}"
        if len(manifest.sources) > _MOST_SOURCES:
            yield "  ..."
    for name, part in (manifest.domains or {}).items():
        share = part.tokens / manifest.tokens
        yield (
            f"domain {printable(name)}: {counted(part.documents, 'document')}, "
            f"{counted(part.tokens, 'token')} ({share:.1%})"
        )
