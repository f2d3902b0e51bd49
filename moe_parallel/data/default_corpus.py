"""The embedded corpus as a tokenizer and indexed datasets on disk, built once in a folder."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.data.atomic_files import atomic_folder, locked
from moe_parallel.data.corpus import (
    DOMAINS,
    SIDES,
    Domain,
    Side,
    content_key,
    python_corpus,
    python_version,
    shared_lines,
)
from moe_parallel.data.indexed import tokenize_documents, write_indexed
from moe_parallel.data.tokenizer import train_byte_bpe
from moe_parallel.errors import InputError
from moe_parallel.reading import read_json

VALID_FRACTION = 0.04

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class DefaultCorpus:
    """A folder with `tokenizer/`, `manifest.json` and `<domain>_<side>.bin/.idx`."""

    folder: Path

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def manifest(self) -> dict[str, Any]:
        """corpus_sha256, python, valid_fraction, vocab_size, and for each domain and side its
        documents, bytes and tokens; `shared_lines`: see moe_parallel.data.corpus."""
        return read_json(self.folder / _MANIFEST, f": delete {self.folder}, to build it again")

    def prefix(self, domain: Domain, side: Side) -> str:
        """The prefix of the indexed dataset of a domain's training or validation side."""
        return str(self.folder / f"{domain}_{side}")


def prepare_default_corpus(
    directory: Path, vocab_size: int = 4096, valid_fraction: float = VALID_FRACTION
) -> DefaultCorpus:
    """Build the corpus in `directory`, or find it there; a second call reads no sources.

    Any number of processes may call this at once: one builds, the others wait for it. A process
    that is killed while it builds leaves nothing that looks like a corpus. An existing corpus
    stays, even when Python is upgraded, so that a resumed run reads the text that it started with.

    Raises:
        InputError: a vocabulary below 257, a Python without sources, a folder that cannot be
            written.
    """
    target = directory / f"python-vocab{vocab_size}-valid{valid_fraction:g}"
    corpus = DefaultCorpus(target)
    if target.is_dir():
        return corpus
    try:
        with locked(directory / f"{target.name}.lock"):
            if not target.is_dir():  # another process may have built it while this one waited
                with atomic_folder(target) as folder:
                    _build(DefaultCorpus(folder), vocab_size, valid_fraction)
    except OSError as error:
        raise InputError(
            f"--data-cache-path {directory} cannot be written ({error.strerror}): "
            "name a folder on a disk with room, or give --data-path"
        ) from None
    return corpus


def _build(corpus: DefaultCorpus, vocab_size: int, valid_fraction: float) -> None:
    texts = python_corpus(valid_fraction)
    training = [text for domain in DOMAINS for text in texts[domain, "train"]]
    tokenizer = train_byte_bpe(training, vocab_size)
    tokenizer.save(corpus.tokenizer_folder)
    domains: dict[str, dict[str, Any]] = {}
    for domain in DOMAINS:
        sizes: dict[str, Any] = {}
        for side in SIDES:
            documents = tokenize_documents(texts[domain, side], tokenizer)
            prefix = Path(corpus.prefix(domain, side))
            written = write_indexed(
                prefix, documents, tokenizer.vocab_size, tokenizer=tokenizer.fingerprint
            )
            sizes[side] = {
                "documents": written.documents,
                "bytes": sum(len(text.encode()) for text in texts[domain, side]),
                "tokens": written.tokens,
            }
        shared = shared_lines(texts[domain, "train"], texts[domain, "valid"])
        domains[domain] = {**sizes, "shared_lines": round(shared, 4)}
    keys = [content_key(text) for side_texts in texts.values() for text in side_texts]
    manifest = {
        "corpus_sha256": hashlib.sha256("".join(sorted(keys)).encode()).hexdigest(),
        "python": python_version(),
        "valid_fraction": valid_fraction,
        "vocab_size": tokenizer.vocab_size,
        "domains": domains,
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (corpus.folder / _MANIFEST).write_text(text, encoding="utf-8")
