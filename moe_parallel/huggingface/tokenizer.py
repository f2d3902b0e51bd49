"""The tokenizer of an exported model, as transformers opens it, and that of an imported one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from moe_parallel.config import DataConfig
from moe_parallel.data.tokenizer import (
    CONFIG_FILE,
    GENERATION_FILE,
    Extras,
    FastTokenizer,
    NullTokenizer,
    SentencePiece,
    SpecialToken,
    Tokenizer,
    build_tokenizer,
    ends_of,
    read_config,
)
from moe_parallel.errors import InputError
from moe_parallel.huggingface.families import Fields, read_fields
from moe_parallel.optional import import_optional

_SPACE = "▁"  # stands for a space in the names of tokens
_UNIGRAM, _BPE = 1, 2  # kinds of models
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # kinds of tokens
#: What a text may have: spaces at its ends and in rows, line ends, other scripts, characters that
#: NFKC folds, and ones that no vocabulary has.
_TEXTS = (
    "a", " a", "a ", "  two  spaces  ", "a\nb\n\n\tc", "naïve ﬁne ①½", "漢字 кот", "😀 \ue000 x",
    "1,234.5%", _SPACE,
)  # fmt: skip


def converted(tokenizer: SentencePiece) -> tokenizers.Tokenizer | None:
    """The same tokenizer for the `tokenizers` library.

    The two libraries compute differently. The tokens are therefore compared on texts of every kind
    and on all tokens of the vocabulary. Of two cuts that are equally probable (0 00 and 00 0), a
    unigram model may take the other one.

    Returns None if a comparison fails, or for a model of words or characters.
    """
    library = import_optional("sentencepiece.sentencepiece_model_pb2", "a SentencePiece model")
    proto = library.ModelProto.FromString(tokenizer.model.serialized_model_proto())
    model = _model(proto)
    if model is None or proto.trainer_spec.treat_whitespace_as_suffix:
        return None
    result = tokenizers.Tokenizer(model)
    result.normalizer = normalizers.Sequence(list(_normalizers(proto.normalizer_spec)))
    result.decoder = _decoder(proto)
    result.add_tokens(
        [
            AddedToken(piece.piece, normalized=False, special=piece.type != _USER_DEFINED)
            for piece in proto.pieces
            if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return result if _agree(result, tokenizer) else None


def _model(proto: Any) -> models.Model | None:
    trainer = proto.trainer_spec
    if trainer.model_type == _UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scores, trainer.unk_id, trainer.byte_fallback)
    if trainer.model_type != _BPE:
        return None
    return models.BPE(
        {piece.piece: i for i, piece in enumerate(proto.pieces)},
        _merges(proto),
        unk_token=trainer.unk_piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Pairs of tokens that join to a token, the one with the best score first."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    # sorted() keeps the order of equal scores, which is that of the ids.
    return [
        (token[:at], token[at:])
        for token in sorted(scores, key=lambda token: -scores[token])
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    ]


def _normalizers(spec: Any) -> Iterator[normalizers.Normalizer]:
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(tokenizers.Regex("^ +| +$"), "")
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(_SPACE)
    yield normalizers.Replace(" ", _SPACE)


def _decoder(proto: Any) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _agree(result: tokenizers.Tokenizer, tokenizer: SentencePiece) -> bool:
    """Whether the ids of all texts, and the texts of the ids, are the same.

    Names of special tokens and of bytes (<0x0A>) are left out: inside a text, the other library
    may read them as the token.
    """
    model = tokenizer.model
    has_ties = isinstance(result.model, models.Unigram)
    special = (model.is_control, model.is_unknown, model.is_byte)
    ordinary = (i for i in range(tokenizer.vocab_size) if not any(is_(i) for is_ in special))
    tokens = [model.id_to_piece(i).replace(_SPACE, " ") for i in ordinary]
    # Between others a token is cut in more ways than alone.
    parts = [tokens[at : at + 50] for at in range(0, len(tokens), 50)]
    rows = [between.join(part) for between in ("", " ") for part in parts]
    for text in [*_TEXTS, *tokens, *rows]:
        ids = tokenizer.tokenize(text)
        found = result.encode(text, add_special_tokens=False).ids
        if found != ids and not (has_ties and sorted(found) == sorted(ids)):
            return False
        # SentencePiece writes another name for what it does not know.
        known = model.unk_id() not in ids
        if known and result.decode(ids, skip_special_tokens=False) != model.decode(ids):
            return False
    return True


@dataclass(frozen=True)
class ExportedTokenizer:
    """What transformers needs to know of the tokenizer."""

    generation: dict[str, Any]  # the fields of generation_config.json
    opens: bool  # in transformers
    adds_special_tokens: bool = False  # to each text, which the run's tools do not

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
    own = _own_tokenizer(folder)
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
        generation = _generation_of(folder, fields)
        _check_end(folder, fields, tokenizer, generation)
        tokenizer.extras = replace(
            tokenizer.extras, generation=generation or None, bos=_bos(folder, tokenizer)
        )
    return tokenizer


def _own_tokenizer(folder: Path) -> Tokenizer | None:
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


def _generation_of(folder: Path, fields: Fields) -> dict[str, Any]:
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
