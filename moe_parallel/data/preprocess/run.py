"""Reads text, tokenizes it, and writes one indexed dataset for each key."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from moe_parallel.config.message import counted
from moe_parallel.data.atomic_files import staging, uninterrupted
from moe_parallel.data.indexed import (
    IndexedWriter,
    ShowProgress,
    Size,
    check_new,
    move_indexed,
)
from moe_parallel.data.preprocess.batches import Reader
from moe_parallel.data.preprocess.inputs import InputFile, find_inputs
from moe_parallel.data.preprocess.records import Bad, Columns
from moe_parallel.data.preprocess.workers import encoding
from moe_parallel.data.tokenizer import Tokenizer, build_tokenizer, train_byte_bpe
from moe_parallel.errors import InputError

# Domains are counted in memory and listed in the manifest.
_MOST_DOMAINS = 1000


@dataclass(frozen=True)
class Preprocessing:
    """What tools/preprocess_data.py does, by its flags.

    Attributes:
        input: files, folders and patterns.
        json_keys: keys or columns with text; each becomes a dataset. The only one takes plain text.
        output_prefix: of the datasets, PREFIX_KEY_document.
        tokenizer_type, tokenizer_model: of the tokenizer; ByteLevelBPE without a model is trained.
        vocab_size: of a tokenizer that is trained, or of NullTokenizer.
        append_eod: whether the end-of-document token follows each document.
        overwrite: whether files that exist are replaced.
        workers: processes that tokenize; they do not change the result.
        max_bad: records that may be left out because they cannot be used.
        domain_key: key or column with the domain of a record; None: the folder's name.
    """

    input: Sequence[str]
    json_keys: Sequence[str]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    append_eod: bool
    overwrite: bool
    workers: int
    max_bad: int
    domain_key: str | None

    @property
    def trains(self) -> bool:
        return self.tokenizer_type == "ByteLevelBPE" and self.tokenizer_model is None

    @property
    def columns(self) -> Columns:
        return Columns(tuple(self.json_keys), self.domain_key)

    @property
    def tokenizer_folder(self) -> Path:
        return Path(f"{self.output_prefix}_tokenizer")

    @property
    def bad_file(self) -> Path:
        return Path(f"{self.output_prefix}_bad.jsonl")

    def dataset(self, key: str) -> Path:
        return Path(f"{self.output_prefix}_{key}_document")

    def check(self) -> None:
        """Raises InputError for an unusable value, or a file that must not be replaced."""
        if self.max_bad < 0:
            raise InputError(f"--max-bad is {self.max_bad}: it must be at least 0")
        for key in self.json_keys:
            if self.json_keys.count(key) > 1 or "/" in key:
                raise InputError(f"--json-keys {key}: name each key once, without a slash")
            check_new(self.dataset(key), self.overwrite)
        files = [self.bad_file, *([self.tokenizer_folder] if self.trains else [])]
        for path in files:
            if path.exists() and not self.overwrite:
                raise InputError(f"{path} exists: give another --output-prefix, or --overwrite")
        if self.trains and self.vocab_size is None:
            raise InputError(
                "--tokenizer-type ByteLevelBPE needs --tokenizer-model FOLDER, "
                "or --vocab-size to train a new one on the input"
            )


class BadRecords:
    """The records that cannot be used. More than `most` of them end the program."""

    def __init__(self, most: int, path: Path | None = None) -> None:
        """`path`: of the file in which each is listed."""
        self.count = 0
        self._most = most
        self._path = path

    def add(self, file: InputFile, unit: str, bad: Bad) -> None:
        """Raises InputError if there are then more than `most`."""
        self.count += 1
        if self.count > self._most:
            many = f"more than --max-bad {self._most} bad records: " if self._most else ""
            raise InputError(
                f"{many}{file} {unit} {bad.number}: {bad.reason}; --max-bad N leaves up to N bad "
                "records out"
            )
        if self._path is not None:
            entry = {"file": str(file.path), unit: bad.number, "reason": bad.reason}
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")


def preprocess(work: Preprocessing, progress: ShowProgress) -> list[str]:
    """Writes the datasets, and the tokenizer if it is new: all of them, or nothing.

    Memory does not grow with the text, except for that of a tokenizer that is trained, which grows
    with the number of different words.

    Returns:
        Lines that say what was written.

    Raises:
        InputError: an unusable flag, file or record; a disk that is full.
    """
    work.check()
    files = find_inputs(work.input)
    # The tokenizers library reads these when it starts its threads, which is later.
    os.environ["RAYON_NUM_THREADS"] = str(work.workers)
    tokenizer = _tokenizer(work, files, progress)
    try:
        with staging(work.tokenizer_folder) as folder:
            written, bad = _write(work, files, tokenizer, folder, progress)
            if work.trains:
                tokenizer.save(folder / work.tokenizer_folder.name)
            with uninterrupted():
                _publish(work, folder)
    except OSError as error:
        raise InputError(
            f"--output-prefix {work.output_prefix} cannot be written ({error.strerror}): "
            "name a folder on a disk with room"
        ) from None
    return _summary(work, tokenizer, written, bad)


def _tokenizer(
    work: Preprocessing, files: Sequence[InputFile], progress: ShowProgress
) -> Tokenizer:
    """Opens the tokenizer that the flags name, or trains one on the input."""
    if not work.trains:
        return build_tokenizer(work.tokenizer_type, work.tokenizer_model, work.vocab_size)
    assert work.vocab_size is not None
    for file in files:
        if file.size is None:
            raise InputError(
                f"{file} is not a file that can be read twice, for the tokenizer and "
                "for the data: give --tokenizer-model"
            )
    with progress("training the tokenizer", _size(files)) as advance:
        return train_byte_bpe(_texts(work, files, advance), work.vocab_size)


def _texts(
    work: Preprocessing, files: Sequence[InputFile], advance: Callable[[int], object]
) -> Iterator[str]:
    bad = BadRecords(work.max_bad)
    for file, batch, read in Reader(files, work.columns, digest=False).batches():
        for record in batch.records(work.columns):
            if isinstance(record, Bad):
                bad.add(file, batch.unit, record)
            else:
                yield from record.texts
        advance(read)


def _size(files: Sequence[InputFile]) -> int | None:
    sizes = [file.size for file in files if file.size is not None]
    return sum(sizes) if len(sizes) == len(files) else None


@dataclass
class _Dataset:
    """One key's dataset while it is written."""

    writer: IndexedWriter
    domains: dict[str, Size]
    empty: int = 0


def _write(
    work: Preprocessing,
    files: Sequence[InputFile],
    tokenizer: Tokenizer,
    folder: Path,
    progress: ShowProgress,
) -> tuple[dict[str, tuple[Size, int]], int]:
    """Writes the datasets to `folder`.

    Returns:
        For each key what was written and the number of empty texts; the number of bad records.
    """
    reader = Reader(files, work.columns)
    bad = BadRecords(work.max_bad, folder / work.bad_file.name)
    with ExitStack() as stack:
        datasets = {}
        for key in work.json_keys:
            writer = IndexedWriter(folder / work.dataset(key).name, tokenizer.vocab_size)
            datasets[key] = _Dataset(stack.enter_context(writer), {})
        encode = stack.enter_context(
            encoding(tokenizer, work.columns, work.append_eod, work.workers, folder / "loaded")
        )
        advance = stack.enter_context(progress("tokenizing", _size(files)))
        for each, encoded in encode(reader.batches()):
            for record in encoded.bad:
                bad.add(each.file, each.batch.unit, record)
            for dataset, documents in zip(datasets.values(), encoded.documents, strict=True):
                dataset.writer.add(documents.lengths_N, documents.ids_T)
                dataset.empty += documents.empty
                _add_up(dataset.domains, documents.domains)
            advance(each.read)
        written = {}
        for key, dataset in datasets.items():
            done = dataset.writer.finish(
                tokenizer=tokenizer.fingerprint, sources=reader.sources, domains=dataset.domains
            )
            written[key] = done, dataset.empty
    return written, bad.count


def _add_up(total: dict[str, Size], more: dict[str, Size]) -> None:
    for domain, size in more.items():
        before = total.get(domain, Size(0, 0))
        total[domain] = Size(before.documents + size.documents, before.tokens + size.tokens)
    if len(total) > _MOST_DOMAINS:
        raise InputError(
            f"there are more than {_MOST_DOMAINS:,} domains: give --domain-key the name of a key "
            "with fewer values, or --input fewer folders"
        )


def _publish(work: Preprocessing, folder: Path) -> None:
    """Gives the files in `folder` their names."""
    if work.trains:
        shutil.rmtree(work.tokenizer_folder, ignore_errors=True)
        os.replace(folder / work.tokenizer_folder.name, work.tokenizer_folder)
    bad = folder / work.bad_file.name
    if bad.exists():
        os.replace(bad, work.bad_file)
    else:
        work.bad_file.unlink(missing_ok=True)
    for key in work.json_keys:
        move_indexed(folder / work.dataset(key).name, work.dataset(key))


def _summary(
    work: Preprocessing,
    tokenizer: Tokenizer,
    written: dict[str, tuple[Size, int]],
    bad: int,
) -> list[str]:
    lines = []
    if work.trains:
        size = f"byte-level BPE, {tokenizer.vocab_size:,} tokens"
        if tokenizer.vocab_size != work.vocab_size:
            size += f", fewer than --vocab-size {work.vocab_size:,}: the text has no more pairs "
            size += "to merge"
        lines.append(f"{work.tokenizer_folder}: {size}")
    for key, (done, empty) in written.items():
        text = f"{work.dataset(key)}: {counted(done.documents, 'document')}, "
        text += counted(done.tokens, "token")
        lines.append(text + (f"; {counted(empty, 'empty text')} left out" if empty else ""))
    if bad:
        lines.append(f"{work.bad_file}: {counted(bad, 'bad record')}, left out")
    return lines
