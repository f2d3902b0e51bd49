"""The embedded corpus: the text that every Python installation contains, in two domains.

`code` is the standard library's own sources. `prose` is the docstrings of those sources and the
language reference that pydoc shows ("topics"). Nothing is imported: sources are read and parsed.

The following is left out:

- tests (`test`, `tests`, `idle_test`): a third to a half of a full installation, but Debian's
  Python does not contain them, and they are full of deliberate nonsense;
- `pydoc_data` from `code`: it is the prose of the topics as one string literal;
- `_sysconfigdata*`: a dump of how this machine's Python was compiled;
- sources that do not decode or do not parse;
- copies: a text with the same bytes as an earlier one;
- near copies: a text of which more than half occurs, line by line, in longer texts of its domain.
  This thins out the tables in `encodings` and the topics that are chapters of other topics.

Held-out text stays unseen. A source file is assigned to one side, training or validation, by the
hash of its content, and its docstrings are on the same side. A docstring that occurs on both sides
is left out of `prose`. So no document of the validation side is seen in training, as code or as
prose. Only text that any two files share remains, such as license headers.

The corpus is on disk as a tokenizer and indexed datasets, built once in a folder.
"""

import ast
import hashlib
import inspect
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_parallel.data.atomic_files import atomic_folder, locked
from moe_parallel.data.datasets import Source
from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.tokenizer import train_byte_bpe
from moe_parallel.errors import InputError

Domain = Literal["code", "prose"]
Side = Literal["train", "valid"]

DOMAINS: tuple[Domain, ...] = ("code", "prose")
SIDES: tuple[Side, ...] = ("train", "valid")

VALID_FRACTION = 0.04

_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
}


@dataclass(frozen=True)
class Document:
    """One text. `key` determines its side: the hash of the file or topic that it comes from."""

    domain: Domain
    name: str
    text: str
    key: str


def python_corpus(
    valid_fraction: float, stdlib: Path | None = None
) -> dict[tuple[Domain, Side], list[str]]:
    """The documents of this Python installation, by domain and side, in a fixed order.

    Args:
        valid_fraction: share of the source files and topics that is held out, e.g. 0.02.
        stdlib: folder of the standard library; default: that of the running interpreter.

    Raises:
        InputError: a fraction outside (0, 1), or a Python without its sources.
    """
    if not 0 < valid_fraction < 1:
        raise InputError(f"the validation fraction {valid_fraction} must lie between 0 and 1")
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    code = drop_near_copies(_read_sources(folder))
    prose = drop_near_copies([*_docstrings(code, valid_fraction), *_topics(folder)])
    corpus: dict[tuple[Domain, Side], list[str]] = {(d, s): [] for d in DOMAINS for s in SIDES}
    for document in (*code, *prose):
        corpus[document.domain, side_of_document(document.key, valid_fraction)].append(
            document.text
        )
    for (domain, side), texts in corpus.items():
        if not texts:
            raise InputError(
                f"the Python at {folder} has no {side} text for the domain {domain!r} "
                "(its sources are missing): use another --python, or give --data-path"
            )
    return corpus


def side_of_document(key: str, valid_fraction: float) -> Side:
    """The side of a hexadecimal sha256: validation for `valid_fraction` of all hashes."""
    return "valid" if int(key[:12], 16) < valid_fraction * 16**12 else "train"


def content_key(text: str) -> str:
    """sha256 of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def drop_near_copies(documents: Iterable[Document]) -> list[Document]:
    """Drop every text of which more than half occurs, line by line, in longer texts kept so far.

    Lengths are counted in characters of stripped lines. An exact copy is the extreme case. Returns
    the kept texts in the order of the input.
    """
    candidates = list(documents)
    longest_first = sorted(range(len(candidates)), key=lambda i: -len(candidates[i].text))
    seen: set[str] = set()
    kept = []
    for i in longest_first:
        lines = [line for raw in candidates[i].text.splitlines() if (line := raw.strip())]
        known = sum(len(line) for line in lines if line in seen)
        if 2 * known <= sum(map(len, lines)) and lines:
            kept.append(i)
            seen.update(lines)
    return [candidates[i] for i in sorted(kept)]


def _read_sources(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if _SKIPPED_FOLDERS.intersection(inside.parts) or path.name.startswith("_sysconfigdata"):
            continue
        text = _read_source(path)
        if text is not None:
            yield Document("code", inside.as_posix(), text, content_key(text))


def _read_source(path: Path) -> str | None:
    """The text of a source file in the encoding that it declares; None if it is not Python."""
    try:
        with tokenize.open(path) as stream:
            text = stream.read()
        _parse(text)
        text.encode()
    except (SyntaxError, ValueError, OSError, RecursionError):  # ValueError: also Unicode errors
        return None
    return text


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources are irrelevant here
        return ast.parse(text)


def _docstrings(sources: list[Document], valid_fraction: float) -> Iterator[Document]:
    """One document per source file: its docstrings, each under the name of what it documents."""
    by_file = [list(_docstrings_of(source)) for source in sources]
    sides: dict[str, set[Side]] = {}
    for source, found in zip(sources, by_file, strict=True):
        for _, docstring in found:
            sides.setdefault(docstring, set()).add(side_of_document(source.key, valid_fraction))
    used: set[str] = set()
    for source, found in zip(sources, by_file, strict=True):
        parts = []
        for name, docstring in found:
            if len(sides[docstring]) == 1 and docstring not in used:
                used.add(docstring)
                parts.append(f"{name}\n\n{docstring}\n")
        if parts:
            yield Document("prose", source.name, "\n".join(parts), source.key)


def _docstrings_of(source: Document) -> Iterator[tuple[str, str]]:
    module = source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    waiting: list[tuple[str, ast.AST]] = [(module, _parse(source.text))]
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=True)
            if docstring and _encodable(docstring):
                yield name, docstring
        for child in reversed(list(ast.iter_child_nodes(node))):
            inner = getattr(child, "name", None)
            waiting.append((f"{name}.{inner}" if isinstance(inner, str) else name, child))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, from an escape in the source
        return False
    return True


def _topics(folder: Path) -> Iterator[Document]:
    """The language reference: a dictionary literal in pydoc_data/topics.py."""
    path = folder / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in _parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                cleaned = inspect.cleandoc(text) + "\n"
                yield Document("prose", name, cleaned, content_key(cleaned))


@dataclass(frozen=True)
class DefaultCorpus:
    """A folder with `tokenizer/` and `<domain>_<side>.bin/.idx`."""

    folder: Path

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    def prefix(self, domain: Domain, side: Side) -> str:
        """The prefix of the indexed dataset of a domain's training or validation side."""
        return str(self.folder / f"{domain}_{side}")


def corpus_sources(corpus: DefaultCorpus) -> list[Source]:
    """The two domains of the embedded corpus, with weights proportional to their tokens."""
    return [
        Source(domain, None, corpus.prefix(domain, "train"), corpus.prefix(domain, "valid"), None)
        for domain in DOMAINS
    ]


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
    for (domain, side), each in texts.items():
        write_indexed(
            Path(corpus.prefix(domain, side)),
            ([*tokenizer.tokenize(text), tokenizer.eod] for text in each),
            tokenizer.vocab_size,
            tokenizer=tokenizer.fingerprint,
        )
