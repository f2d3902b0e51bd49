"""Tokenizers, their files, and what they carry for transformers."""

import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from moe_parallel.data.tokenizer import (
    Extras,
    build_tokenizer,
    load_tokenizer,
    read_extras,
    train_byte_bpe,
)
from moe_parallel.errors import InputError
from tests.data.hostile import hostile_folder
from tests.data.small_text import small_bpe, words

AWKWARD = [
    "",
    " ",
    "\r\n\t  def f():\n        return 1\n",
    "naïve façade 漢字 🙂\u200d e\u0301",
    "\x00\x7f\x85\u2028",
    "ends with the words <|endoftext|> spelled out",
]


def test_a_text_comes_back_whole_and_its_bytes_add_up() -> None:
    bpe = small_bpe()
    texts = [*AWKWARD, words(50, seed=9)]
    assert bpe.tokenize_all(texts) == [bpe.tokenize(text) for text in texts]
    counts = bpe.bytes_per_token
    for text in texts:
        ids = bpe.tokenize(text)
        assert bpe.detokenize(ids) == text and bpe.eod not in ids
        assert counts[ids].sum() == len(text.encode())
    assert counts.shape == (300,) and counts.dtype == np.int64
    assert np.count_nonzero(counts == 1) >= 256 and counts[bpe.eod] == 0
    assert json.dumps(bpe.unique_identifiers)  # Megatron names its cache by it


def test_training_gives_the_same_tokenizer_of_the_size_asked_for() -> None:
    assert small_bpe().fingerprint == small_bpe().fingerprint != small_bpe(299).fingerprint
    merges = 2  # "ab", " ab"
    assert train_byte_bpe(["ab ab"], 1000).vocab_size == 256 + 1 + merges
    for vocab_size, wrong in ((256, "small.*257"), (2**24 + 1, "large"), (10**30, "large")):
        with pytest.raises(InputError, match=rf"--vocab-size {vocab_size} is too {wrong}"):
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


@pytest.mark.parametrize("word", ["50", "-1", "seven", "9" * 6000, "²"])
def test_a_null_tokenizer_refuses_what_is_no_token(word: str) -> None:
    tokenizer = build_tokenizer("NullTokenizer", None, 50)
    with pytest.raises(InputError, match=r"numbers from 0 to 49 \(--vocab-size 50\), not '"):
        tokenizer.tokenize(f"12 {word} 9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("@", None),
            r"--tokenizer-type @ is unknown: use one of ByteLevelBPE, HuggingFaceTokenizer",
        ),
        (("ByteLevelBPE", None), r"ByteLevelBPE needs --tokenizer-model"),
        (("HuggingFaceTokenizer", None), r"HuggingFaceTokenizer needs --tokenizer-model"),
        (("SentencePieceTokenizer", "missing.model"), r"missing\.model.*check the path"),
        (("ByteLevelBPE", "."), r"there is no file tokenizer\.json"),
        (("NullTokenizer", None), r"NullTokenizer needs --vocab-size"),
    ],
)
def test_a_wrong_choice_is_told_in_one_line(
    arguments: tuple[str, str | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        build_tokenizer(*arguments)
    assert "\n" not in str(caught.value)


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers, an optional library, is missing")
    monkeypatch.setattr("builtins.input", lambda *of: pytest.fail("asked"))
    folder = hostile_folder(tmp_path)
    with pytest.raises(InputError, match=r"without running code of the folder's own") as told:
        build_tokenizer("HuggingFaceTokenizer", str(folder))
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()


def test_a_hub_that_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:  # the connection ends without an answer
            asked.append(self.client_address)

    with socketserver.TCPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the delay before a retry
        with pytest.raises(InputError, match=r"--tokenizer-model no/such.*local path") as told:
            build_tokenizer("HuggingFaceTokenizer", "no/such")
        server.shutdown()
    assert "\n" not in str(told.value)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"model":' * 100_000, b"\xff\xfe", b"", b"null", b"{}"]
)
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path: Path, content: bytes) -> None:
    small_bpe().save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=str(tmp_path)) as told:
            load_tokenizer(tmp_path)
        assert "\n" not in str(told.value)
        (tmp_path / name).write_bytes(whole)


Change = Callable[[dict[str, Any]], object]  # of the content of tokenizer.json

#: Takes 2^40 steps, of which the library tries some, for the text of the test.
ENDLESS = {
    "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
}  # fmt: skip
#: The library panics while it opens the file.
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AQ=="}
NO_UNKNOWN = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"<|endoftext|>": 0}}


def saved_with(change: Change, folder: Path) -> None:
    small_bpe().save(folder)
    rules = json.loads((folder / "tokenizer.json").read_text())
    change(rules)
    _json(folder, "tokenizer.json", rules)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rules: rules["model"]["vocab"].update(a=10**9),
            "tokenizer.json is not a .* .its token 1000000000 is above 16777215, the most",
        ),
        (
            lambda rules: rules.update(pre_tokenizer=ENDLESS),
            "--tokenizer-model: the tokenizer gives up on a text .*: repair",
        ),
        (
            lambda rules: rules.update(normalizer=CHARSMAP),
            "tokenizer.json is not a tokenizer.json .*Cannot parse precompiled",
        ),
        (
            lambda rules: rules.update(model=NO_UNKNOWN),
            "--tokenizer-model: the tokenizer gives up on a text .*Missing .UNK. .*",
        ),
    ],
)
def test_rules_without_bounds_are_one_line(tmp_path: Path, change: Change, message: str) -> None:
    saved_with(change, tmp_path)
    with pytest.raises(InputError, match=message) as told:
        load_tokenizer(tmp_path).tokenize_all(["a" * 40 + "b"])
    assert "\n" not in str(told.value)


def swap(rules: dict[str, Any]) -> None:
    """Exchange the ids of two tokens of the same length."""
    vocabulary = rules["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda rules: rules["model"].update(another_option=False), True),  # of a newer library
        (swap, False),
        (lambda rules: rules["model"]["merges"].pop(), False),
        (lambda rules: rules["pre_tokenizer"].update(use_regex=False), False),
    ],
)
def test_the_fingerprint_is_of_what_makes_ids(tmp_path: Path, change: Change, same: bool) -> None:
    saved_with(change, tmp_path)
    assert (load_tokenizer(tmp_path).fingerprint == small_bpe().fingerprint) is same


CONFIG = "tokenizer_config.json"


def _json(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    fields = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "unk_token": None,
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "extra_special_tokens": {"image_token": "<image>"},
        "model_max_length": 12,
    }
    _json(tmp_path, CONFIG, fields)
    assert read_extras(tmp_path).special_tokens == {
        "bos_token": "<s>",
        "additional_special_tokens": ["<a>", "<b>"],
        "extra_special_tokens": {"image_token": "<image>"},
    }
    assert read_extras(tmp_path / "nowhere") == Extras()


def test_a_folder_that_was_saved_has_the_same(tmp_path: Path) -> None:
    theirs, first, second = (tmp_path / name for name in ("theirs", "first", "second"))
    small_bpe().save(theirs)
    fields = {"bos_token": "e", "chat_template": "{{ bos_token }}", "eos_token": "<|endoftext|>"}
    _json(theirs, CONFIG, fields)
    _json(theirs, "generation_config.json", {"eos_token_id": [0, 5], "top_p": 0.9})
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(theirs))
    tokenizer.save(first)
    load_tokenizer(first).save(second)
    assert tokenizer.extras.chat_template == "{{ bos_token }}"
    assert read_extras(second) == read_extras(theirs) == tokenizer.extras
    assert tokenizer.extras.generation == {"eos_token_id": [0, 5], "top_p": 0.9}
    # A file of the template counts before the field. A field may hold several.
    (first / "chat_template.jinja").write_text("naïve\n")
    assert read_extras(first).chat_template == "naïve\n"
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    _json(theirs, CONFIG, fields | {"chat_template": several})
    build_tokenizer("HuggingFaceTokenizer", str(theirs)).save(tmp_path / "third")
    assert read_extras(tmp_path / "third").chat_template == several
    # The ids of a text are the same without them.
    assert tokenizer.fingerprint == load_tokenizer(second).fingerprint
    assert tokenizer.fingerprint == small_bpe().fingerprint


def _written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _changed(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: _json(folder, CONFIG, {"eos_token": "<|endoftext|>"} | fields)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_changed(bos_token=5), "bos_token is 5: it must be a token"),
        (_changed(extra_special_tokens={"image": 4}), "special_tokens.. is 4: it must be a"),
        (_written(CONFIG, b'{"bos_token": ' + b"[" * 100_000), "is damaged .nested too deeply"),
        (_written("chat_template.jinja", b"\xff"), "chat_template.jinja is damaged ..utf-8. codec"),
        (_written("generation_config.json", b"{"), "generation_config.json is damaged .not JSON"),
        (_written("generation_config.json", b'{"eos_token_id": [1, "a"]}'), "eos_token_id is .1, "),
    ],
)
def test_what_is_no_such_folder_is_one_line(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    small_bpe().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as told:
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert str(tmp_path) in str(told.value) and "\n" not in str(told.value)
