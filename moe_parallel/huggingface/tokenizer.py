"""The tokenizer of an exported model, in the files that transformers opens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moe_parallel.data.tokenizer import FastTokenizer, SentencePiece, Tokenizer
from moe_parallel.data.tokenizer_files import CONFIG_FILE, read_config
from moe_parallel.huggingface.sentence_piece import converted


@dataclass(frozen=True)
class ExportedTokenizer:
    """What transformers needs to know of the tokenizer."""

    eos_token_id: int
    opens: bool  # in transformers
    adds_special_tokens: bool = False  # to each text, unless it is told not to


def write_tokenizer(tokenizer: Tokenizer, length: int, folder: Path) -> ExportedTokenizer:
    """Write `tokenizer` to `folder`. `length`: the most tokens that the model reads.

    transformers opens a tokenizer of the `tokenizers` library. A SentencePiece model is converted
    to one if that gives the same tokens; otherwise its file is copied.
    """
    if isinstance(tokenizer, SentencePiece):
        fast = converted(tokenizer)
        if fast is None:
            tokenizer.save(folder)
            return ExportedTokenizer(tokenizer.eod, opens=False)
        end = tokenizer.model.id_to_piece(tokenizer.eod)
        tokenizer = FastTokenizer(fast, end, "HuggingFaceTokenizer")
    if not isinstance(tokenizer, FastTokenizer):
        return ExportedTokenizer(tokenizer.eod, opens=False)
    tokenizer.save(folder)
    fields = read_config(folder) | {
        "pad_token": tokenizer.end_of_document,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    encoded = tokenizer.model.encode("a", add_special_tokens=True).ids
    return ExportedTokenizer(tokenizer.eod, True, encoded != tokenizer.tokenize("a"))
