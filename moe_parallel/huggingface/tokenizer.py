"""The tokenizer of an exported model, in the files that transformers opens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from moe_parallel.data.tokenizer import (
    CONFIG_FILE,
    Extras,
    FastTokenizer,
    SentencePiece,
    SpecialToken,
    Tokenizer,
    ends_of,
    read_config,
)
from moe_parallel.huggingface.sentence_piece import converted


@dataclass(frozen=True)
class ExportedTokenizer:
    """What transformers needs to know of the tokenizer."""

    generation: dict[str, Any]  # the fields of generation_config.json
    opens: bool  # in transformers
    adds_special_tokens: bool = False  # to each text, which the run's tools do not
    left_out: list[str] = field(default_factory=list)  # fields with tokens that it does not have

    @property
    def ids(self) -> dict[str, Any]:
        """The ids of config.json: bos_token_id and eos_token_id, which may be several."""
        return {name: self.generation.get(name) for name in ("bos_token_id", "eos_token_id")}


def write_tokenizer(tokenizer: Tokenizer, length: int, folder: Path) -> ExportedTokenizer:
    """Write `tokenizer` to `folder`. `length`: the most tokens that the model reads.

    transformers opens a tokenizer of the `tokenizers` library. A SentencePiece model is converted
    to one if that gives the same tokens; otherwise its file is copied. transformers would add a
    special token that the vocabulary lacks, with an id that the model does not have. Such a token
    is left out.
    """
    extras = tokenizer.extras
    if isinstance(tokenizer, SentencePiece):
        fast = converted(tokenizer)
        if fast is None:
            tokenizer.save(folder)
            return ExportedTokenizer(_generation(extras, tokenizer.eod), opens=False)
        end = tokenizer.model.id_to_piece(tokenizer.eod)
        tokenizer = FastTokenizer(fast, end, "HuggingFaceTokenizer")
        tokenizer.extras = extras
        if extras.bos is not None:
            bos = fast.id_to_token(extras.bos)
            fast.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, extras.bos)]
            )
    if not isinstance(tokenizer, FastTokenizer):
        return ExportedTokenizer(_generation(extras, tokenizer.eod), opens=False)
    tokens = _known(extras.special_tokens, tokenizer.model)
    written = copy(tokenizer)
    pads = {"pad_token": tokenizer.end_of_document}
    written.extras = replace(extras, special_tokens=pads | tokens, bos=None)
    written.save(folder)
    fields = read_config(folder) | {
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    encoded = tokenizer.model.encode("a", add_special_tokens=True).ids
    own = [*tokenizer.beginning, *tokenizer.tokenize("a")]
    ids = {
        f"{name}_id": tokenizer.model.token_to_id(tokens[name])
        for name in ("bos_token", "pad_token")
        if name in tokens
    }
    return ExportedTokenizer(
        generation=_generation(extras, tokenizer.eod, **ids),
        opens=True,
        adds_special_tokens=encoded != own,
        left_out=sorted(
            name for name, token in extras.special_tokens.items() if tokens.get(name) != token
        ),
    )


def _known(
    special_tokens: Mapping[str, SpecialToken], model: tokenizers.Tokenizer
) -> dict[str, Any]:
    """The special tokens that the vocabulary has, by field."""

    def has(token: str) -> bool:
        return model.token_to_id(token) is not None

    found: dict[str, Any] = {}
    for name, token in special_tokens.items():
        if isinstance(token, list):
            found[name] = [each for each in token if has(each)]
        elif isinstance(token, dict):
            found[name] = {key: each for key, each in token.items() if has(each)}
        elif has(token):
            found[name] = token
    return found


def _generation(extras: Extras, end: int, **ids: int | None) -> dict[str, Any]:
    """generation_config.json: the original's, in which `end` ends a text too.

    `ids`: of tokens, for fields that it does not have.
    """
    fields = dict(extras.generation or {})
    several = ends_of(fields)
    if end not in several:
        several = [*several, end]
    fields["eos_token_id"] = several[0] if len(several) == 1 else several
    for name, value in {"pad_token_id": end, **ids}.items():
        if fields.get(name) is None:
            fields[name] = value
    return fields
