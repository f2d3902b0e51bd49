"""A SentencePiece model in an export: transformers gives the same tokens, or does not open it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from moe_parallel.data.tokenizer import SentencePiece, build_tokenizer, load_tokenizer
from moe_parallel.huggingface.tokenizer import converted, write_tokenizer
from tests.data.small_text import words

TEXTS = [
    "the expert Ω reads",
    " two  spaces  and one at the end ",
    "lines\n\n\tand tabs",
    "ﬁne ① 漢字 😀",
    words(300, 7),
    "",
]
#: As Llama 2, Mistral and Mixtral have it.
LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


def trained(folder: Path, **options: Any) -> SentencePiece:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([words(40, seed) for seed in range(80)]),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return SentencePiece(folder / "tokenizer.model")


@pytest.mark.parametrize(
    "options",
    [
        LLAMA,
        LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["<pad>"]},
        {"model_type": "bpe", "byte_fallback": True},
        {"model_type": "unigram", "byte_fallback": True},
        {"model_type": "unigram"},
    ],
    ids=["llama", "no prefix", "bpe", "unigram", "without bytes"],
)
def test_transformers_gives_the_same_tokens(options: Any, tmp_path: Path) -> None:
    ours = trained(tmp_path, **options)
    assert write_tokenizer(ours, 64, tmp_path / "out").opens
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == ours.tokenize(text), text
        if ours.model.unk_id() not in ids:
            assert theirs.decode(ids) == ours.detokenize(ids)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eod, ours.eod)
    assert theirs.decode([*ours.tokenize("the"), ours.eod], skip_special_tokens=True) == "the"
    assert len(theirs) == ours.vocab_size


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "word"},
        {"model_type": "unigram", "treat_whitespace_as_suffix": True},
        # In SentencePiece this symbol is never cut, in tokenizers only outside of words.
        {"model_type": "unigram", "user_defined_symbols": ["he", "th"], "byte_fallback": True},
    ],
    ids=["words", "spaces after words", "symbols that overlap"],
)
def test_a_model_that_would_give_other_tokens_is_copied(options: Any, tmp_path: Path) -> None:
    ours = trained(tmp_path, **options)
    assert converted(ours) is None
    assert not write_tokenizer(ours, 64, tmp_path / "out").opens
    copy = tmp_path / "out" / "tokenizer.model"
    assert copy.read_bytes() == (tmp_path / "tokenizer.model").read_bytes()
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_special_tokens_and_templates_are_kept(tmp_path: Path) -> None:
    trained(tmp_path, **LLAMA)
    fields = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    ours = build_tokenizer("SentencePieceTokenizer", str(tmp_path))
    ours.extras = replace(ours.extras, bos=1)  # as an import sets it
    ours.save(tmp_path / "run")
    written = write_tokenizer(load_tokenizer(tmp_path / "run"), 64, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    talk = [{"role": "user", "content": "the expert"}]
    assert theirs.apply_chat_template(talk, tokenize=False) == "<s>the expert"
    assert written.generation == {"eos_token_id": 2, "pad_token_id": 2, "bos_token_id": 1}
    assert theirs("the expert")["input_ids"] == [1, *ours.tokenize("the expert")]
