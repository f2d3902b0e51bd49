"""Batches from text files, for a model that reads them: nothing is shuffled, nothing written.

Shape suffixes: S tokens of a sequence, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from moe_parallel.data.text_files import read_texts
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.model.forward import Batch


def documents_of(path: Path) -> Iterator[str]:
    """The texts of a .jsonl file, under the key `text` of each line; any other file is one text.

    Raises InputError for a file that cannot be read or is not UTF-8.
    """
    if path.suffix == ".jsonl":
        yield from read_texts(path, flag="--text")
        return
    try:
        yield path.read_bytes().decode()
    except OSError as error:
        raise InputError(f"--text {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"--text {path} is not UTF-8: convert it") from None


def sequences_of(path: Path, tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """The token ids of a file's documents, each with the end of a document after it, one after
    another, cut into sequences of `length`; the last may be shorter."""
    ids: list[int] = []
    for text in documents_of(path):
        ids += [*tokenizer.beginning, *tokenizer.tokenize(text), tokenizer.eod]
        whole = len(ids) // length * length
        yield from (ids[first : first + length] for first in range(0, whole, length))
        ids = ids[whole:]
    if ids:
        yield ids


def text_batches(
    path: Path, tokenizer: Tokenizer, length: int, batch_size: int, samples: int | None = None
) -> Iterator[Batch]:
    """Batches of a file: tokens, position_ids, loss_mask [B, S].

    `samples`: the most sequences. Short sequences are filled with the end of a document, which the
    mask leaves out. So is the last batch, up to `batch_size` sequences.
    """
    waiting: list[list[int]] = []
    for number, sequence in enumerate(sequences_of(path, tokenizer, length)):
        if number == samples:
            break
        waiting.append(sequence)
        if len(waiting) == batch_size:
            yield _batch(waiting, length, batch_size, tokenizer.eod)
            waiting = []
    if waiting:
        yield _batch(waiting, length, batch_size, tokenizer.eod)


def _batch(sequences: list[list[int]], length: int, batch_size: int, filler: int) -> Batch:
    tokens_BS = torch.full((batch_size, length), filler)
    mask_BS = torch.zeros(batch_size, length)
    for place, sequence in enumerate(sequences):
        tokens_BS[place, : len(sequence)] = torch.tensor(sequence)
        mask_BS[place, : len(sequence)] = 1
    positions_BS = torch.arange(length).expand(batch_size, length)
    return {"tokens": tokens_BS, "position_ids": positions_BS, "loss_mask": mask_BS}
