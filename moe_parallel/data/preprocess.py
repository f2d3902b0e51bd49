"""From files of text to one indexed dataset for each key: the work of tools/preprocess_data.py.

Batches of records are tokenized in this process or in several, in their order. Each batch is
tokenized by itself, so the number of processes does not change the result.
"""

import json
import os
import shutil
import signal
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

import numpy as np

from moe_parallel.config.message import counted
from moe_parallel.data.atomic_files import staging, uninterrupted
from moe_parallel.data.indexed import (
    IndexedWriter,
    ShowProgress,
    Size,
    SourceFile,
    check_new,
    id_type,
    move_indexed,
)
from moe_parallel.data.text_files import (
    Bad,
    Batch,
    Columns,
    InputFile,
    find_inputs,
    read_batches,
    records,
)
from moe_parallel.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    load_tokenizer,
    train_byte_bpe,
)
from moe_parallel.errors import InputError

# Domains are counted in memory and listed in the manifest.
_MOST_DOMAINS = 1000
# Batches that wait per worker, so that none is idle, and the most text in all of them.
_WAITING_BATCHES = 3
_WAITING_BYTES = 64 * 2**20


@dataclass
class Documents:
    """The documents of a batch under one key. Those without a token are left out and counted."""

    lengths_N: np.ndarray  # int32
    ids_T: np.ndarray
    domains: dict[str, Size]
    empty: int


@dataclass
class Encoded:
    """The result of a batch: documents for each of `Columns.texts`, and the unusable records."""

    documents: list[Documents]
    bad: list[Bad] = field(default_factory=list)


class Encoder:
    """From a batch of records to token ids."""

    def __init__(self, tokenizer: Tokenizer, columns: Columns, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._columns = columns
        self._ending = [tokenizer.eod] if append_eod else []
        self._dtype = id_type(tokenizer.vocab_size)

    def __call__(self, batch: Batch) -> Encoded:
        texts: list[list[str]] = [[] for _ in self._columns.texts]
        domains: list[str] = []
        bad: list[Bad] = []
        for record in records(batch, self._columns):
            if isinstance(record, Bad):
                bad.append(record)
                continue
            try:
                for text in record.texts:
                    self._tokenizer.check(text)
            except InputError as error:
                bad.append(Bad(record.number, str(error)))
                continue
            domains.append(record.domain)
            for column, text in zip(texts, record.texts, strict=True):
                column.append(text)
        return Encoded([self._documents(column, domains) for column in texts], bad)

    def _documents(self, texts: list[str], domains: list[str]) -> Documents:
        all_ids = self._tokenizer.tokenize_all(texts)
        kept = [ids + self._ending for ids in all_ids if ids]
        sizes: dict[str, Size] = {}
        for ids, domain in zip(all_ids, domains, strict=True):
            if ids:
                _add_up(sizes, {domain: Size(1, len(ids) + len(self._ending))})
        lengths_N = np.array([len(ids) for ids in kept], dtype=np.int32)
        ids_T = np.fromiter(chain.from_iterable(kept), self._dtype, int(lengths_N.sum()))
        return Documents(lengths_N, ids_T, sizes, len(texts) - len(kept))


def _add_up(total: dict[str, Size], more: dict[str, Size]) -> None:
    for domain, size in more.items():
        before = total.get(domain, Size(0, 0))
        total[domain] = Size(before.documents + size.documents, before.tokens + size.tokens)


#: Batches, each with its file and the bytes that were read for it, and these with their result.
_Read = tuple[InputFile, Batch, int]
_Encode = Callable[[Iterable[_Read]], Iterator[tuple[_Read, Encoded]]]


@contextmanager
def encoding(
    tokenizer: Tokenizer, columns: Columns, append_eod: bool, workers: int, folder: Path
) -> Iterator[_Encode]:
    """A function that encodes batches, with `workers` further processes if more than one.

    Args:
        tokenizer: of the documents.
        columns: as for Encoder.
        append_eod: as for Encoder.
        workers: number of processes that tokenize.
        folder: a path that does not exist, for the tokenizer that the processes load.
    """
    if workers == 1:
        encoder = Encoder(tokenizer, columns, append_eod)
        yield lambda batches: ((each, encoder(each[1])) for each in batches)
        return
    tokenizer.save(folder)
    pool = ProcessPoolExecutor(
        workers,
        # Not fork: this process has threads, of the tokenizers library among others.
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(folder, tokenizer.fingerprint, columns, append_eod),
    )

    def in_order(batches: Iterable[_Read]) -> Iterator[tuple[_Read, Encoded]]:
        waiting: deque[tuple[_Read, int, Future[Encoded]]] = deque()
        size = 0
        for each in batches:
            more = _bytes(each[1])
            while waiting and (
                len(waiting) >= _WAITING_BATCHES * workers or size + more > _WAITING_BYTES
            ):
                first, less, result = waiting.popleft()
                size -= less
                yield first, result.result()
            waiting.append((each, more, pool.submit(_encode, each[1])))
            size += more
        for first, _, result in waiting:
            yield first, result.result()

    try:
        yield in_order
    except BrokenProcessPool:
        raise InputError(
            f"--workers {workers}: a worker was killed, perhaps for lack of memory: give fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _bytes(batch: Batch) -> int:
    if isinstance(batch.data, bytes):
        return len(batch.data)
    return sum(len(value or b"") for row in batch.data or [] for value in row)


# The encoder of a worker process: an executor's tasks have no other place for their state.
_encoder: Encoder


def _begin(folder: Path, fingerprint: str, columns: Columns, append_eod: bool) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.fingerprint == fingerprint
    _encoder = Encoder(tokenizer, columns, append_eod)


def _end_with_parent() -> None:
    """A worker would wait forever for the next batch of a parent that was killed."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode(batch: Batch) -> Encoded:
    return _encoder(batch)


class _BadRecords:
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


def preprocess(flags: Namespace, progress: ShowProgress) -> list[str]:
    """Writes the datasets, and the tokenizer if it is new: all of them, or nothing.

    Memory does not grow with the text, except for 20 bytes a document, and for a tokenizer that is
    trained, which grows with the number of different words.

    Args:
        flags: those of tools/preprocess_data.py, which describes them.
        progress: shows the progress.

    Returns:
        Lines that say what was written.

    Raises:
        InputError: an unusable flag, file or record; a disk that is full.
    """
    trains = flags.tokenizer_type == "ByteLevelBPE" and flags.tokenizer_model is None
    prefix = flags.output_prefix
    datasets = {key: Path(f"{prefix}_{key}_document") for key in flags.json_keys}
    bad_file, tokenizer_folder = Path(f"{prefix}_bad.jsonl"), Path(f"{prefix}_tokenizer")
    _check(flags, trains, datasets, [bad_file, *([tokenizer_folder] if trains else [])])
    files = find_inputs(flags.input)
    columns = Columns(tuple(flags.json_keys), flags.domain_key)
    # The tokenizers library reads this when it starts its threads, which is later.
    os.environ["RAYON_NUM_THREADS"] = str(flags.workers)
    sizes = [file.size for file in files if file.size is not None]
    bytes_of_files = sum(sizes) if len(sizes) == len(files) else None
    if trains:
        for file in files:
            if file.size is None:
                raise InputError(
                    f"{file} is not a file that can be read twice, for the tokenizer and "
                    "for the data: give --tokenizer-model"
                )
        with progress("training the tokenizer", bytes_of_files) as advance:
            texts = _texts(files, columns, flags.max_bad, advance)
            tokenizer: Tokenizer = train_byte_bpe(texts, flags.vocab_size)
    else:
        tokenizer = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size)
    try:
        with staging(tokenizer_folder) as folder:
            bad = _BadRecords(flags.max_bad, folder / bad_file.name)
            with (
                encoding(
                    tokenizer, columns, flags.append_eod, flags.workers, folder / "loaded"
                ) as encode,
                progress("tokenizing", bytes_of_files) as advance,
            ):
                written = _write(
                    {key: folder / path.name for key, path in datasets.items()},
                    tokenizer,
                    lambda sources: encode(read_batches(files, columns, sources)),
                    bad,
                    advance,
                )
            if trains:
                tokenizer.save(folder / tokenizer_folder.name)
            with uninterrupted():
                if trains:
                    shutil.rmtree(tokenizer_folder, ignore_errors=True)
                    os.replace(folder / tokenizer_folder.name, tokenizer_folder)
                bad_file.unlink(missing_ok=True)
                if bad.count:
                    os.replace(folder / bad_file.name, bad_file)
                for path in datasets.values():
                    move_indexed(folder / path.name, path)
    except OSError as error:
        raise InputError(
            f"--output-prefix {prefix} cannot be written ({error.strerror}): "
            "name a folder on a disk with room"
        ) from None
    lines = []
    if trains:
        size = f"byte-level BPE, {tokenizer.vocab_size:,} tokens"
        if tokenizer.vocab_size != flags.vocab_size:
            size += f", fewer than --vocab-size {flags.vocab_size:,}: the text has no more pairs "
            size += "to merge"
        lines.append(f"{tokenizer_folder}: {size}")
    for path, (done, empty) in zip(datasets.values(), written, strict=True):
        text = f"{path}: {counted(done.documents, 'document')}, {counted(done.tokens, 'token')}"
        lines.append(text + (f"; {counted(empty, 'empty text')} left out" if empty else ""))
    if bad.count:
        lines.append(f"{bad_file}: {counted(bad.count, 'bad record')}, left out")
    return lines


def _check(flags: Namespace, trains: bool, datasets: dict[str, Path], files: list[Path]) -> None:
    """Raises InputError for an unusable value, or a file that must not be replaced."""
    if flags.max_bad < 0:
        raise InputError(f"--max-bad is {flags.max_bad}: it must be at least 0")
    for key in flags.json_keys:
        if flags.json_keys.count(key) > 1 or "/" in key:
            raise InputError(f"--json-keys {key}: name each key once, without a slash")
        check_new(datasets[key], flags.overwrite)
    for path in files:
        if path.exists() and not flags.overwrite:
            raise InputError(f"{path} exists: give another --output-prefix, or --overwrite")
    if trains and flags.vocab_size is None:
        raise InputError(
            "--tokenizer-type ByteLevelBPE needs --tokenizer-model FOLDER, "
            "or --vocab-size to train a new one on the input"
        )


def _texts(
    files: Sequence[InputFile], columns: Columns, max_bad: int, advance: Callable[[int], object]
) -> Iterator[str]:
    bad = _BadRecords(max_bad)
    for file, batch, read in read_batches(files, columns):
        for record in records(batch, columns):
            if isinstance(record, Bad):
                bad.add(file, batch.unit, record)
            else:
                yield from record.texts
        advance(read)


def _write(
    prefixes: dict[str, Path],
    tokenizer: Tokenizer,
    encoded: Callable[[list[SourceFile]], Iterator[tuple[_Read, Encoded]]],
    bad: _BadRecords,
    advance: Callable[[int], object],
) -> list[tuple[Size, int]]:
    """Writes a dataset for each key. Returns what was written and the number of empty texts."""
    sources: list[SourceFile] = []
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(prefix, tokenizer.vocab_size))
            for prefix in prefixes.values()
        ]
        domains: list[dict[str, Size]] = [{} for _ in writers]
        empty = [0] * len(writers)
        for (file, batch, read), result in encoded(sources):
            for record in result.bad:
                bad.add(file, batch.unit, record)
            for i, documents in enumerate(result.documents):
                writers[i].add(documents.lengths_N, documents.ids_T)
                empty[i] += documents.empty
                _add_up(domains[i], documents.domains)
                if len(domains[i]) > _MOST_DOMAINS:
                    raise InputError(
                        f"there are more than {_MOST_DOMAINS:,} domains: give --domain-key the "
                        "name of a key with fewer values, or --input fewer folders"
                    )
            advance(read)
        return [
            (writer.finish(tokenizer=tokenizer.fingerprint, sources=tuple(sources), domains=of), no)
            for writer, of, no in zip(writers, domains, empty, strict=True)
        ]
