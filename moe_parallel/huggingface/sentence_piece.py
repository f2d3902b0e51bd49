"""A SentencePiece model as a tokenizer of the `tokenizers` library, which transformers opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from moe_parallel.data.tokenizer import SentencePiece
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
