"""From files of text to one indexed dataset for each key: the work of tools/preprocess_data.py."""

import os
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np

from moe_parallel.config.message import counted
from moe_parallel.data.atomic_files import staging, uninterrupted
from moe_parallel.data.indexed import IndexedWriter, ShowProgress, check_new, id_type, move_indexed
from moe_parallel.data.text_files import Bad, Record, find_inputs, read_records
from moe_parallel.data.tokenizer import Tokenizer, build_tokenizer, train_byte_bpe
from moe_parallel.errors import InputError

# Texts of about so many characters are tokenized together, but not more than so many texts. This
# does not change the result.
_BATCH, _TEXTS = 2**20, 4096


def preprocess(flags: Namespace, progress: ShowProgress) -> list[str]:
    """Writes the datasets, and the tokenizer if it is new: all of them, or nothing.

    Memory does not grow with the text, except for 4 bytes a document, and for a tokenizer that is
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
    prefix, keys = flags.output_prefix, flags.json_keys
    datasets = [Path(f"{prefix}_{key}_document") for key in keys]
    tokenizer_folder = Path(f"{prefix}_tokenizer")
    if flags.max_bad < 0:
        raise InputError(f"--max-bad is {flags.max_bad}: it must be at least 0")
    for key, path in zip(keys, datasets, strict=True):
        if keys.count(key) > 1 or "/" in key:
            raise InputError(f"--json-keys {key}: name each key once, without a slash")
        check_new(path, flags.overwrite)
    if trains and tokenizer_folder.exists() and not flags.overwrite:
        raise InputError(f"{tokenizer_folder} exists: give another --output-prefix, or --overwrite")
    if trains and flags.vocab_size is None:
        raise InputError(
            "--tokenizer-type ByteLevelBPE needs --tokenizer-model FOLDER, "
            "or --vocab-size to train a new one on the input"
        )
    files = find_inputs(flags.input)
    # The tokenizers library reads this when it starts its threads, which is later.
    os.environ["RAYON_NUM_THREADS"] = str(flags.workers)
    sizes = [file.size for file in files if file.size is not None]
    size = sum(sizes) if len(sizes) == len(files) else None
    if trains:
        if size is None:
            raise InputError(
                "--input has a pipe or a device, and without --tokenizer-model the text must be "
                "read twice: name files"
            )
        with progress("training the tokenizer", size) as advance:
            texts = _usable(read_records(files, keys, advance), flags.max_bad, [])
            tokenizer: Tokenizer = train_byte_bpe(
                chain.from_iterable(record.texts for record in texts), flags.vocab_size
            )
    else:
        tokenizer = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size)
    bad: list[Bad] = []
    empty = [0] * len(keys)
    try:
        with staging(tokenizer_folder) as folder:
            with progress("tokenizing", size) as advance, ExitStack() as stack:
                writers = [
                    stack.enter_context(IndexedWriter(folder / path.name, tokenizer.vocab_size))
                    for path in datasets
                ]
                texts = _usable(read_records(files, keys, advance), flags.max_bad, bad)
                for batch in _batches(texts):
                    for i, writer in enumerate(writers):
                        empty[i] += _add(writer, batch, i, tokenizer, flags.append_eod)
                sources = tuple(str(file.path) for file in files)
                written = [
                    writer.finish(tokenizer=tokenizer.fingerprint, sources=sources)
                    for writer in writers
                ]
            if trains:
                tokenizer.save(folder / tokenizer_folder.name)
            with uninterrupted():
                if trains:
                    shutil.rmtree(tokenizer_folder, ignore_errors=True)
                    os.replace(folder / tokenizer_folder.name, tokenizer_folder)
                for path in datasets:
                    move_indexed(folder / path.name, path)
    except OSError as error:
        raise InputError(
            f"--output-prefix {prefix} cannot be written ({error.strerror}): "
            "name a folder on a disk with room"
        ) from None
    lines = []
    if trains:
        text = f"byte-level BPE, {tokenizer.vocab_size:,} tokens"
        if tokenizer.vocab_size != flags.vocab_size:
            text += f", fewer than --vocab-size {flags.vocab_size:,}: the text has no more pairs "
            text += "to merge"
        lines.append(f"{tokenizer_folder}: {text}")
    for path, (documents, tokens), no_text in zip(datasets, written, empty, strict=True):
        text = f"{path}: {counted(documents, 'document')}, {counted(tokens, 'token')}"
        lines.append(text + (f"; {counted(no_text, 'empty text')} left out" if no_text else ""))
    return lines + [f"left out: {place}: {reason}" for place, reason in bad]


def _usable(records: Iterable[Record | Bad], most: int, bad: list[Bad]) -> Iterator[Record]:
    """The records without the bad ones. Raises InputError if more than `most` are bad."""
    for record in records:
        if isinstance(record, Record):
            yield record
            continue
        bad.append(record)
        if len(bad) > most:
            many = f"more than --max-bad {most} bad records: " if most else ""
            raise InputError(
                f"{many}{record.place}: {record.reason}; --max-bad N leaves up to N bad records out"
            )


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += sum(map(len, record.texts))
        if size >= _BATCH or len(batch) == _TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _add(
    writer: IndexedWriter, batch: list[Record], key: int, tokenizer: Tokenizer, append_eod: bool
) -> int:
    """Append documents. Returns the number of texts without a token, which are left out."""
    try:
        all_ids = tokenizer.tokenize_all([record.texts[key] for record in batch])
    except InputError as error:
        raise InputError(f"{batch[0].place} or a later one: {error}") from None
    ending = [tokenizer.eod] if append_eod else []
    kept = [ids + ending for ids in all_ids if ids]
    lengths_N = np.array([len(ids) for ids in kept], dtype=np.int32)
    dtype = id_type(tokenizer.vocab_size)
    writer.add(lengths_N, np.fromiter(chain.from_iterable(kept), dtype, int(lengths_N.sum())))
    return len(batch) - len(kept)
