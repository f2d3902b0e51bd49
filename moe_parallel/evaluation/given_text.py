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

#: A text file is read by this many characters. The pieces that are cut from them have at most three
#: times as many.
TEXT_PIECE = 1 << 20


def pieces_of(path: Path, key: str = "text") -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends after it), piece by piece.

    A .jsonl file has one document per line, under `key`. Any other file is one document, whose
    pieces end with a line; a longer line is cut before a space between words, and a longer word
    anywhere. Raises InputError for a file that cannot be read or is not UTF-8.
    """
    if path.suffix == ".jsonl":
        yield from ((text, True) for text in read_texts(path, key, flag="--text"))
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rest = ""
            while block := file.read(TEXT_PIECE):
                text = rest + block
                cut = _last_cut(text)
                yield text[:cut], False
                rest = text[cut:]
        yield rest, True
    except OSError as error:
        raise InputError(f"--text {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"--text {path} is not UTF-8: convert it") from None


def _last_cut(text: str) -> int:
    """Where the last line ends; if there is none, where the last word but one ends."""
    if cut := text.rfind("\n") + 1:
        return cut
    words = text.rsplit(maxsplit=1)
    return len(words[0]) if len(words) == 2 else len(text)


def sequences_of(path: Path, tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """The token ids of a file's documents, each with the end of a document after it, one after
    another, cut into sequences of `length`; the last may be shorter."""
    ids, begins = [], True
    for piece, ends in pieces_of(path):
        ids += tokenizer.beginning if begins else []
        ids += [*tokenizer.tokenize(piece), *([tokenizer.eod] if ends else [])]
        begins = ends
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
