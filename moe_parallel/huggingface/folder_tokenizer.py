"""The tokenizer of a folder of transformers, compared with its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_parallel.config import DataConfig
from moe_parallel.data.tokenizer import (
    GENERATION_FILE,
    FastTokenizer,
    NullTokenizer,
    SentencePiece,
    Tokenizer,
    build_tokenizer,
    read_config,
)
from moe_parallel.errors import InputError
from moe_parallel.huggingface.fields import Fields, read_fields

#: The files of a tokenizer, the preferred ones first, and the --tokenizer-type that reads them.
_FILES = {
    "tokenizer.json": "HuggingFaceTokenizer",
    "tokenizer.model": "SentencePieceTokenizer",
    "vocab.json": "HuggingFaceTokenizer",
}


def tokenizer_of_folder(folder: Path, fields: Fields, data: DataConfig) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        folder: of the model.
        fields: its config.json.
        data: may name a tokenizer by --tokenizer-type or --tokenizer-model, which must then be that
            of the folder if it has one.

    Raises InputError if there is no tokenizer, or one of another model.
    """
    vocab_size: int = fields.integer("vocab_size")
    own = _own(folder)
    default = DataConfig()
    if (data.tokenizer_type, data.tokenizer_model) == (
        default.tokenizer_type,
        default.tokenizer_model,
    ):
        if own is None:
            raise InputError(
                f"--input {folder}: it has no tokenizer: name one by --tokenizer-type and "
                "--tokenizer-model; for a model without text, --tokenizer-type NullTokenizer"
            )
        tokenizer = own
    else:
        tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, vocab_size)
        if own is not None and own.fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"--tokenizer-type {data.tokenizer_type} --tokenizer-model {data.tokenizer_model} "
                f"differs from the tokenizer of --input {folder}: leave the flags out"
            )
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"--input {folder}: the tokenizer has {tokenizer.vocab_size} tokens, and the model "
            f"has {vocab_size}: they are of different models"
        )
    if not isinstance(tokenizer, NullTokenizer):
        generation = _generation(folder, fields)
        _check_end(folder, fields, tokenizer, generation)
        tokenizer.extras = replace(
            tokenizer.extras, generation=generation or None, bos=_bos(folder, tokenizer)
        )
    return tokenizer


def _own(folder: Path) -> Tokenizer | None:
    for file, kind in _FILES.items():
        if (folder / file).is_file():
            return build_tokenizer(kind, str(folder))
    return None


def _bos(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The token that transformers puts before each text; None: it puts none."""
    if isinstance(tokenizer, SentencePiece):
        bos: int = tokenizer.model.bos_id()
        return bos if bos >= 0 and read_config(folder).get("add_bos_token") is True else None
    assert isinstance(tokenizer, FastTokenizer)  # tokenizer.json says it alone
    begins = tokenizer.model.encode("a", add_special_tokens=True).ids[:1]
    return None if begins == tokenizer.tokenize("a")[:1] else begins[0]


def _generation(folder: Path, fields: Fields) -> dict[str, Any]:
    """generation_config.json; without it, the ids of config.json from which transformers makes it.

    Raises InputError for ids that are no integers.
    """
    file = folder / GENERATION_FILE
    generation = read_fields(file) if file.is_file() else fields
    generation.integers("eos_token_id")
    generation.integer("bos_token_id", default=None, least=0)
    if generation is not fields:
        return dict(generation.values)
    ids = {name: fields.values.get(name) for name in ("bos_token_id", "eos_token_id")}
    return {name: value for name, value in ids.items() if value is not None}


def _check_end(
    folder: Path, fields: Fields, tokenizer: Tokenizer, generation: dict[str, Any]
) -> None:
    """Check that the model and the tokenizer end a text with the same token."""
    ends = fields.integers("eos_token_id") + Fields(folder / GENERATION_FILE, generation).integers(
        "eos_token_id"
    )
    if ends and tokenizer.eod not in ends:
        raise InputError(
            f"--input {folder}: the tokenizer ends a text with token {tokenizer.eod}, and "
            f"eos_token_id of config.json is {', '.join(map(str, sorted(set(ends))))}: they are of "
            "different models, or tokenizer_config.json names another eos_token"
        )
