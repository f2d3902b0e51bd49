"""What an indexed dataset contains: sizes, lengths, duplicates, samples as text."""

import hashlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from moe_parallel.config.message import counted
from moe_parallel.data.indexed import (
    ANY_VOCABULARY,
    Manifest,
    ShowProgress,
    check_indexed,
    read_manifest,
    type_of_ids,
)
from moe_parallel.data.sealed import file_digest
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError

_QUANTILES = (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1)
_BAR = 40
_MOST_SOURCES = 10


class Inspected:
    """A dataset that is complete and fits its manifest and its tokenizer.

    Attributes:
        prefix: path without .bin and .idx.
        manifest: None: it has none.
        lengths_N: int32, tokens of each document.
        ids_T: of all documents, a memory map.
        end, ended: the most frequent last token of the documents, and how many end with it.
    """

    def __init__(self, prefix: str, tokenizer: Tokenizer | None) -> None:
        """
        Raises:
            InputError: files as in check_indexed; another tokenizer than the manifest's.
        """
        self.prefix = prefix
        self.manifest = read_manifest(prefix)
        wrote = None if self.manifest is None else self.manifest.tokenizer
        if tokenizer is not None and wrote not in (None, tokenizer.fingerprint):
            raise InputError(
                f"--data-path {prefix} was written with another tokenizer, by its fingerprint "
                f"{str(wrote)[:12]}, and --tokenizer-model has {tokenizer.fingerprint[:12]}: give "
                "the one that wrote it, or none"
            )
        vocab_size = ANY_VOCABULARY if tokenizer is None else tokenizer.vocab_size
        self.lengths_N = check_indexed(prefix, vocab_size)
        self.ids_T = np.memmap(f"{prefix}.bin", mode="r", dtype=type_of_ids(prefix))
        self._ends_N = np.cumsum(self.lengths_N, dtype=np.int64)
        ids, counts = np.unique(
            self.ids_T[self._ends_N[self.lengths_N > 0] - 1], return_counts=True
        )
        self.end, self.ended = int(ids[counts.argmax()]), int(counts.max())

    def __getitem__(self, i: int) -> np.ndarray:
        """The ids of document i."""
        return self.ids_T[self._ends_N[i] - self.lengths_N[i] : self._ends_N[i]]

    def digests(self, advance: Callable[[int], object]) -> np.ndarray:
        """uint64 [N]: equal for equal documents, whether or not the most frequent end follows."""
        digests_N = np.empty(len(self.lengths_N), dtype=np.uint64)
        for i, length in enumerate(self.lengths_N.tolist()):
            ids = self[i]
            body = ids[:-1] if length and ids[-1] == self.end else ids
            digest = hashlib.blake2b(body.astype(np.int32).data, digest_size=8)
            digests_N[i] = int.from_bytes(digest.digest(), "little")
            advance(length)
        return digests_N


def inspected(
    flags: Namespace, tokenizer: Tokenizer | None, progress: ShowProgress
) -> Iterator[tuple[Inspected, list[str]]]:
    """Each dataset and the lines of its report.

    Memory holds some tens of bytes per document, and no tokens.

    Args:
        flags: those of tools/inspect_data.py, which describes them.
        tokenizer: that wrote the data; None: ids are shown.
        progress: shows the progress.

    Raises:
        InputError: see Inspected; a document in --documents that does not exist.
    """
    before: list[tuple[str, np.ndarray]] = []
    for prefix in flags.data_path:
        data = Inspected(prefix, tokenizer)
        count = len(data.lengths_N)
        numbers = flags.documents
        if numbers is None:
            random = np.random.default_rng(flags.seed)
            chosen = random.choice(count, min(flags.samples, count), replace=False)
            numbers = sorted(chosen.tolist())
        for i in numbers:
            if not 0 <= i < count:
                raise InputError(
                    f"--documents {i}: {prefix} has {count:,}; give a number from 0 to {count - 1}"
                )
        with progress(f"reading {prefix}", int(data.lengths_N.sum(dtype=np.int64))) as advance:
            digests_N = data.digests(advance)
        report = [*_described(data, tokenizer), repeats(digests_N)]
        for other, others_N in before:
            found = int(np.isin(digests_N, others_N).sum())
            report.append(f"{counted(found, 'document')} ({found / count:.1%}) also in {other}")
        for i in numbers:
            report.append(f"document {i:,}, {data.lengths_N[i]:,} tokens:")
            text = _text(data[i], tokenizer, flags.characters)
            report += [f"  | {line}" for line in text.split("\n")]
        before.append((prefix, digests_N))
        yield data, report


def repeats(digests_N: np.ndarray) -> str:
    """A line about equal digests: the documents that repeat an earlier one, and an example."""
    _, first, counts = np.unique(digests_N, return_index=True, return_counts=True)
    repeated, most = len(digests_N) - len(counts), counts.max()
    line = f"{counted(repeated, 'repeated document')} ({repeated / len(digests_N):.1%})"
    if repeated:
        line += f"; document {first[counts == most].min():,} occurs {most:,} times"
    return line


def _text(ids: np.ndarray, tokenizer: Tokenizer | None, most: int) -> str:
    """The first `most` characters of a document, or of its ids without a tokenizer."""
    some = ids[: most + 1].tolist()  # a token has a character or more, nearly always
    text = " ".join(map(str, some)) if tokenizer is None else tokenizer.detokenize(some)
    whole = len(some) == len(ids) and len(text) <= most
    return printable(text[:most]) + ("" if whole else " ...")


def printable(text: str) -> str:
    """The text with escapes for control characters, which could command a terminal."""
    kept = (
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(kept)


def _described(data: Inspected, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Lines about the whole dataset, without reading its tokens."""
    lengths_N, manifest = data.lengths_N, data.manifest
    tokens = int(lengths_N.sum(dtype=np.int64))
    size = f"{counted(len(lengths_N), 'document')}, {counted(tokens, 'token')}"
    yield f"{size} of type {data.ids_T.dtype.name}"
    if manifest is None:
        yield "no manifest: the tokenizer, the sources and the domains are unknown"
    else:
        yield from _origin(manifest)
    known = tokenizer is not None and data.end == tokenizer.eod
    name = ", the end of document" if known else ""
    yield f"last token {data.end}{name}: {counted(data.ended, 'document')}"
    quantiles = np.quantile(lengths_N, _QUANTILES, method="nearest")
    names = ("shortest", "1%", "25%", "median", "75%", "99%", "longest")
    yield f"tokens per document: mean {tokens / len(lengths_N):,.1f}, " + ", ".join(
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


def histogram(lengths_N: np.ndarray) -> list[str]:
    """A line for each power of 2: the range of lengths, the number of documents, a bar."""
    counts = np.bincount(np.frexp(lengths_N.astype(np.float64))[1])
    lines = []
    for power in range(int(np.flatnonzero(counts)[0]), len(counts)):
        shortest, longest = (1 << power) >> 1, (1 << power) - 1
        bar = "#" * int(np.ceil(_BAR * counts[power] / counts.max()))
        lines.append(f"{shortest:>11,} - {longest:<11,}{counts[power]:>13,}  {bar}".rstrip())
    return lines


def changed_sources(data: Inspected) -> Sequence[str]:
    """The sources that are missing or have changed since they were read, with the reason.

    Raises:
        InputError: the dataset does not name its sources.
    """
    if data.manifest is None or data.manifest.sources is None:
        raise InputError(
            f"--check-sources: {data.prefix} has no manifest that names source files; "
            "leave the flag out"
        )
    wrong = []
    for source in data.manifest.sources:
        try:
            found = Path(source.path).stat().st_size
            if found != source.bytes:
                wrong.append(f"{source.path} has {found:,} bytes, not {source.bytes:,}")
            elif file_digest(Path(source.path)) != source.sha256:
                wrong.append(f"{source.path} has other content")
        except OSError as error:
            wrong.append(f"{source.path} cannot be read ({error.strerror})")
    return wrong
