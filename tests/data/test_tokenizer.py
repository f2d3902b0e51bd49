import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from moe_parallel.data.tokenizer import build_tokenizer, load_tokenizer, train_byte_bpe
from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe, words

AWKWARD = [
    "",
    " ",
    "\r\n\t  def f():\n        return 1\n",
    "naïve façade 漢字 🙂\u200d e\u0301",
    "\x00\x7f\x85\u2028",
    "ends with the words <|endoftext|> spelled out",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_text_comes_back_whole_and_its_bytes_add_up(text: str) -> None:
    bpe = small_bpe()
    ids = bpe.tokenize(text)
    assert bpe.detokenize(ids) == text
    assert bpe.bytes_per_token[ids].sum() == len(text.encode())


def test_every_single_byte_has_a_token_of_one_byte() -> None:
    counts = small_bpe().bytes_per_token
    assert np.count_nonzero(counts == 1) >= 256
    assert counts.shape == (300,) and counts.dtype == np.int64


def test_the_end_of_document_is_no_text() -> None:
    bpe = small_bpe()
    assert bpe.bytes_per_token[bpe.eod] == 0
    assert bpe.eod not in bpe.tokenize("a <|endoftext|> b")


def test_tokenizing_many_is_tokenizing_each() -> None:
    bpe = small_bpe()
    texts = [*AWKWARD, words(50, seed=9)]
    assert bpe.tokenize_all(texts) == [bpe.tokenize(text) for text in texts]


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert small_bpe().fingerprint == small_bpe().fingerprint
    assert small_bpe().fingerprint != small_bpe(299).fingerprint


def test_a_small_text_makes_a_small_vocabulary() -> None:
    merges = 2  # "ab", " ab"
    assert train_byte_bpe(["ab ab"], 1000).vocab_size == 256 + 1 + merges


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(InputError, match=r"--vocab-size 256 is too small.*257"):
        train_byte_bpe(["text"], 256)


def test_a_vocabulary_beyond_memory_is_refused() -> None:
    for vocab_size in (2**24 + 1, 2**31, 10**30):
        with pytest.raises(InputError, match=rf"--vocab-size {vocab_size} is too large"):
            train_byte_bpe(["text"], vocab_size)


def test_a_saved_tokenizer_opens_again(tmp_path: Path) -> None:
    bpe = small_bpe()
    bpe.save(tmp_path)
    text = words(60, seed=5)
    for again in (
        load_tokenizer(tmp_path),
        build_tokenizer("ByteLevelBPE", str(tmp_path)),
        build_tokenizer("ByteLevelBPE", str(tmp_path / "tokenizer.json")),
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path)),
    ):
        assert again.tokenize(text) == bpe.tokenize(text)
        assert again.eod == bpe.eod
        assert again.fingerprint == bpe.fingerprint
        np.testing.assert_array_equal(again.bytes_per_token, bpe.bytes_per_token)


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match="tokenizer.json"):
        small_bpe().save(tmp_path)


def test_megatron_can_name_its_cache_after_a_tokenizer() -> None:
    assert json.dumps(small_bpe().unique_identifiers)


def test_a_hugging_face_folder_says_which_token_ends_a_document(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "one": 1, "##two": 2, "stop": 3}
    model = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.enable_truncation(1)
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"no token that ends a document.*eos_token"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))

    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "stop"}}')
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert tokenizer.eod == 3
    assert tokenizer.tokenize("onetwo one") == [1, 2, 1], "the file's truncation must not cut"
    assert tokenizer.bytes_per_token[1:].tolist() == [3, 3, 4]
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").fingerprint == tokenizer.fingerprint


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="pip install sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(words(30, seed) for seed in range(60)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=290,
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tokenizer.model"))
    ids = tokenizer.tokenize("the expert Ω reads")
    assert tokenizer.detokenize(ids) == "the expert Ω reads"
    # One byte more than the text: the space that SentencePiece adds in front.
    assert tokenizer.bytes_per_token[ids].sum() == len(" the expert Ω reads".encode())
    assert tokenizer.bytes_per_token[tokenizer.eod] == 0
    assert tokenizer.tokenize_all(["the", "a"]) == [tokenizer.tokenize(t) for t in ("the", "a")]
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").fingerprint == tokenizer.fingerprint


def test_a_null_tokenizer_reads_numbers(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("NullTokenizer", None, 50)
    assert tokenizer.tokenize("12 7 9") == [12, 7, 9]
    assert tokenizer.detokenize([12, 7, 9]) == "12 7 9"
    assert (tokenizer.vocab_size, tokenizer.eod) == (50, 49)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("word", ["50", "-1", "seven", "1.5", "9" * 6000, "²"])
def test_a_null_tokenizer_refuses_what_is_no_token(word: str) -> None:
    tokenizer = build_tokenizer("NullTokenizer", None, 50)
    for read in (tokenizer.tokenize, tokenizer.check):
        with pytest.raises(InputError, match=r"numbers from 0 to 49 \(--vocab-size 50\), not '"):
            read(f"12 {word} 9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ByteLevelBP", None), r"--tokenizer-type ByteLevelBP is unknown: did you mean ByteLevel"),
        (("@", None), r"use one of ByteLevelBPE, HuggingFaceTokenizer"),
        (("ByteLevelBPE", None), r"ByteLevelBPE needs --tokenizer-model"),
        (("HuggingFaceTokenizer", None), r"HuggingFaceTokenizer needs --tokenizer-model"),
        (("SentencePieceTokenizer", "missing.model"), r"missing\.model.*check the path"),
        (("ByteLevelBPE", "."), r"there is no file tokenizer\.json"),
        (("NullTokenizer", None), r"NullTokenizer needs --vocab-size"),
    ],
)
def test_a_wrong_choice_is_told_in_one_line(
    arguments: tuple[str, str | None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        build_tokenizer(*arguments)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_told(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    for kind in ("ByteLevelBPE", "HuggingFaceTokenizer"):
        with pytest.raises(InputError, match=r"wrong\.json is not a tokenizer\.json"):
            build_tokenizer(kind, str(wrong))
    with pytest.raises(InputError, match=r"not a tokenizer folder"):
        load_tokenizer(tmp_path)


def test_a_file_that_is_no_sentencepiece_model_is_told(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="pip install sentencepiece")
    wrong = tmp_path / "wrong.model"
    wrong.write_text("{}")
    with pytest.raises(InputError, match=r"wrong\.model is not a SentencePiece"):
        build_tokenizer("SentencePieceTokenizer", str(wrong))
