"""What an indexed dataset contains: sizes, lengths, repeats, documents as text."""

import hashlib
from argparse import Namespace
from collections.abc import Iterator

import numpy as np

from moe_parallel.config.message import counted
from moe_parallel.data.indexed import (
    ANY_VOCABULARY,
    ShowProgress,
    check_indexed,
    read_manifest,
    type_of_ids,
)
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError

_QUANTILES = {
    "shortest": 0, "1%": 0.01, "25%": 0.25, "median": 0.5, "75%": 0.75, "99%": 0.99, "longest": 1,
}  # fmt: skip
_MOST_SOURCES = 10


def inspected(
    flags: Namespace, tokenizer: Tokenizer | None, progress: ShowProgress
) -> Iterator[list[str]]:
    """The lines of the report about each dataset.

    Memory holds some tens of bytes per document, and no tokens.

    Args:
        flags: those of tools/inspect_data.py, which describes them.
        tokenizer: that wrote the data; None: ids are shown.
        progress: shows the progress.

    Raises:
        InputError: files as in check_indexed; another tokenizer than the manifest's; a document in
            --documents that does not exist.
    """
    before: list[tuple[str, np.ndarray]] = []
    for prefix in flags.data_path:
        manifest = read_manifest(prefix)
        wrote = None if manifest is None else manifest.tokenizer
        if tokenizer is not None and wrote not in (None, tokenizer.fingerprint):
            raise InputError(
                f"--data-path {prefix} was written with another tokenizer, by its fingerprint "
                f"{str(wrote)[:12]}, and --tokenizer-model has {tokenizer.fingerprint[:12]}: give "
                "the one that wrote it, or none"
            )
        lengths_N = check_indexed(
            prefix, ANY_VOCABULARY if tokenizer is None else tokenizer.vocab_size
        )
        ids_T = np.memmap(f"{prefix}.bin", mode="r", dtype=type_of_ids(prefix))
        ends_N = np.cumsum(lengths_N, dtype=np.int64)
        count, tokens = len(lengths_N), int(ends_N[-1])
        last, counts = np.unique(ids_T[ends_N[lengths_N > 0] - 1], return_counts=True)
        end, ended = int(last[counts.argmax()]), int(counts.max())
        numbers = flags.documents
        if numbers is None:
            random = np.random.default_rng(flags.seed)
            numbers = sorted(random.choice(count, min(flags.samples, count), replace=False))
        for i in numbers:
            if not 0 <= i < count:
                raise InputError(
                    f"--documents {i}: {prefix} has {count:,}; give a number from 0 to {count - 1}"
                )
        digests_N = np.empty(count, dtype=np.uint64)
        with progress(f"reading {prefix}", tokens) as advance:
            for i, length in enumerate(lengths_N.tolist()):
                ids = ids_T[ends_N[i] - length : ends_N[i]]
                # Equal documents, whether or not the end of document follows them.
                body = ids[:-1] if length and ids[-1] == end else ids
                digest = hashlib.blake2b(body.astype(np.int32).data, digest_size=8)
                digests_N[i] = int.from_bytes(digest.digest(), "little")
                advance(length)

        size = f"{counted(count, 'document')}, {counted(tokens, 'token')}"
        report = [f"{size} of type {ids_T.dtype.name}"]
        if manifest is None:
            report.append("no manifest: the tokenizer and the sources are unknown")
        else:
            length = (
                ""
                if manifest.seq_length is None
                else f"; for --seq-length {manifest.seq_length} only"
            )
            report.append(f"tokenizer {(wrote or 'unknown')[:12]}{length}")
            sources = [printable(str(source)) for source in manifest.sources or ()]
            more = ["..."] * (len(sources) > _MOST_SOURCES)
            report += [f"source {each}" for each in sources[:_MOST_SOURCES] + more]
        name = ", the end of document" if tokenizer is not None and end == tokenizer.eod else ""
        report.append(f"last token {end}{name}: {counted(ended, 'document')}")
        quantiles = np.quantile(lengths_N, list(_QUANTILES.values()), method="nearest")
        report.append(
            f"tokens per document: mean {tokens / count:,.1f}, "
            + ", ".join(f"{name} {n:,}" for name, n in zip(_QUANTILES, quantiles, strict=True))
        )
        _, first, counts = np.unique(digests_N, return_index=True, return_counts=True)
        repeated, most = count - len(counts), counts.max()
        report.append(f"{counted(repeated, 'repeated document')} ({repeated / count:.1%})")
        if repeated:
            report[-1] += f"; document {first[counts == most].min():,} occurs {most:,} times"
        for other, others_N in before:
            found = int(np.isin(digests_N, others_N).sum())
            report.append(f"{counted(found, 'document')} ({found / count:.1%}) also in {other}")
        before.append((prefix, digests_N))
        for i in numbers:
            report.append(f"document {i:,}, {lengths_N[i]:,} tokens:")
            # A token has a character or more, nearly always.
            ids = ids_T[ends_N[i] - lengths_N[i] : ends_N[i]][: flags.characters + 1].tolist()
            text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.detokenize(ids)
            cut = len(ids) < lengths_N[i] or len(text) > flags.characters
            text = printable(text[: flags.characters]) + (" ..." if cut else "")
            report += [f"  | {line}" for line in text.split("\n")]
        yield report


def printable(text: str) -> str:
    """The text with escapes for control characters, which could command a terminal."""
    kept = (
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(kept)
