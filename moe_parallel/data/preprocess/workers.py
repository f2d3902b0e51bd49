"""Tokenizes batches in this process or in several, in the order of the batches.

Each batch is tokenized by itself, so the number of processes does not change the result.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

from moe_parallel.data.preprocess.batches import RawBatch, ReadBatch
from moe_parallel.data.preprocess.encoder import Encoded, Encoder
from moe_parallel.data.preprocess.records import Columns
from moe_parallel.data.tokenizer import Tokenizer, load_tokenizer
from moe_parallel.errors import InputError

# Text that waits for a worker, or whose result waits to be written; one batch may be larger.
_WAITING_BYTES = 64 * 2**20
# Batches that wait per worker, so that none is idle.
_WAITING_BATCHES = 3

Encode = Callable[[Iterable[ReadBatch]], Iterator[tuple[ReadBatch, Encoded]]]


@contextmanager
def encoding(
    tokenizer: Tokenizer, columns: Columns, append_eod: bool, workers: int, folder: Path
) -> Iterator[Encode]:
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
        yield lambda batches: ((each, encoder(each.batch)) for each in batches)
        return
    tokenizer.save(folder)
    pool = ProcessPoolExecutor(
        workers,
        # Not fork: this process has threads, of the tokenizers library among others.
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(folder, tokenizer.fingerprint, columns, append_eod),
    )
    try:
        yield lambda batches: _in_order(pool, batches, workers)
    except BrokenProcessPool:
        raise InputError(
            f"--workers {workers}: a worker was killed, perhaps for lack of memory: give fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, batches: Iterable[ReadBatch], workers: int
) -> Iterator[tuple[ReadBatch, Encoded]]:
    waiting: deque[tuple[ReadBatch, Future[Encoded]]] = deque()
    size = 0
    for each in batches:
        while waiting and (
            len(waiting) >= _WAITING_BATCHES * workers or size + each.batch.size > _WAITING_BYTES
        ):
            first, result = waiting.popleft()
            size -= first.batch.size
            yield first, result.result()
        waiting.append((each, pool.submit(_encode, each.batch)))
        size += each.batch.size
    while waiting:
        first, result = waiting.popleft()
        yield first, result.result()


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


def _encode(batch: RawBatch) -> Encoded:
    return _encoder(batch)
