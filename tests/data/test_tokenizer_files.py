import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.data.tokenizer import build_tokenizer, load_tokenizer
from moe_parallel.errors import InputError
from tests.data.hostile import hostile_folder
from tests.data.small_text import small_bpe


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


def huge_id(rules: dict[str, Any]) -> None:
    rules["model"]["vocab"]["a"] = 10**9


def endless_expression(rules: dict[str, Any]) -> None:
    """Takes 2^40 steps, of which the library tries some, for the text of the test."""
    rules["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


def short_charsmap(rules: dict[str, Any]) -> None:
    """The library panics while it opens the file."""
    rules["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AQ=="}


def no_unknown(rules: dict[str, Any]) -> None:
    vocabulary = {"<|endoftext|>": 0}
    rules["model"] = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": vocabulary}


def _replacing(pattern: dict[str, str], content: str, times: int) -> dict[str, Any]:
    each = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [each] * times, "decoders": [each] * times}


def growing_text(rules: dict[str, Any]) -> None:
    rules["normalizer"] = _replacing({"String": "a"}, "a" * 10, times=4)


def growing_everywhere(rules: dict[str, Any]) -> None:
    rules["normalizer"] = _replacing({"Regex": ""}, "a", times=13)


def growing_output(rules: dict[str, Any]) -> None:
    rules["decoder"] = _replacing({"String": "a"}, "a" * 10, times=4)


def long_beginning(rules: dict[str, Any]) -> None:
    rules["normalizer"] = {"type": "Prepend", "prepend": "a" * 5000}


def repeated_text(rules: dict[str, Any]) -> None:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    rules["post_processor"] = {
        "type": "TemplateProcessing", "single": [text] * 5000, "pair": [], "special_tokens": {},
    }  # fmt: skip


def long_word(rules: dict[str, Any]) -> None:
    rules["model"] = {
        "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "",
        "max_input_chars_per_word": 10**18, "vocab": {"a": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (rule, "tokenizer.json is not a .* .its rules may make a text more than 4096 times")
            for rule in (
                growing_text,
                growing_everywhere,
                growing_output,
                long_beginning,
                repeated_text,
            )
        ),
        (long_word, "tokenizer.json is not a .* .its max_input_chars_per_word 10.* above 1000"),
        (huge_id, "tokenizer.json is not a .* .its token 1000000000 is above 16777215, the most"),
        (endless_expression, "--tokenizer-model: the tokenizer gives up on a text .*: repair"),
        (short_charsmap, "tokenizer.json is not a tokenizer.json .*Cannot parse precompiled"),
        (no_unknown, "--tokenizer-model: the tokenizer gives up on a text .*Missing .UNK. .*"),
    ],
)
def test_rules_without_bounds_are_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    small_bpe().save(tmp_path)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    change(rules)
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(InputError, match=message) as told:
        load_tokenizer(tmp_path).tokenize_all(["a" * 40 + "b"])
    assert "\n" not in str(told.value)


def test_usual_rules_are_within_the_bounds(tmp_path: Path) -> None:
    small_bpe().save(tmp_path)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    spaces = _replacing({"Regex": " {2,}"}, "▁", times=10)["normalizers"]
    quotes = _replacing({"String": "``"}, '"', times=100)["normalizers"]
    rules["normalizer"] = {"type": "Sequence", "normalizers": [*spaces, *quotes]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    assert load_tokenizer(tmp_path).tokenize("a  b")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_type": ["ByteLevelBPE"]},
        {"tokenizer_type": "NullTokenizer", "vocab_size": "50"},
        {"tokenizer_type": "NullTokenizer", "vocab_size": None},
        {"tokenizer_type": "NullTokenizer", "vocab_size": 10**12},
        {"tokenizer_type": 5},
    ],
)
def test_a_configuration_of_other_types_is_one_line(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(changes))
    with pytest.raises(InputError) as told:
        load_tokenizer(tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("eos", [5, ["<|endoftext|>"], {"content": 7}, {}])
def test_an_end_of_another_type_is_not_believed(tmp_path: Path, eos: object) -> None:
    bpe = small_bpe()
    bpe.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": eos}))
    assert load_tokenizer(tmp_path).fingerprint == bpe.fingerprint


def options_off(rules: dict[str, Any]) -> None:
    """The file of a library that has an additional option."""
    rules["model"]["another_option"] = False
    rules["model"].pop("fuse_unk")


def swapped(rules: dict[str, Any]) -> None:
    """Two tokens of the same length, with exchanged ids."""
    vocabulary = rules["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def without_a_merge(rules: dict[str, Any]) -> None:
    rules["model"]["merges"].pop()


def other_splitting(rules: dict[str, Any]) -> None:
    rules["pre_tokenizer"]["use_regex"] = False


@pytest.mark.parametrize(
    ("change", "same"),
    [(options_off, True), (swapped, False), (without_a_merge, False), (other_splitting, False)],
)
def test_the_fingerprint_is_of_what_makes_ids(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], same: bool
) -> None:
    bpe = small_bpe()
    bpe.save(tmp_path)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    change(rules)
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    assert (load_tokenizer(tmp_path).fingerprint == bpe.fingerprint) is same
