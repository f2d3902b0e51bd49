"""What is carried for transformers: read from its files, written again, or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.data.tokenizer import Extras, build_tokenizer, load_tokenizer, read_extras
from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe

CONFIG = "tokenizer_config.json"


def _json(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_files_of_templates_count_before_the_field(tmp_path: Path) -> None:
    _json(tmp_path, CONFIG, {"chat_template": "field"})
    assert read_extras(tmp_path).chat_templates == {"default": "field"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("tools {{ x }}\n")
    (tmp_path / "chat_template.jinja").write_text("naïve\n")
    extras = read_extras(tmp_path)
    assert extras.chat_templates == {"default": "naïve\n", "tool_use": "tools {{ x }}\n"}
    # One field holds all of them, and reads the same.
    again = tmp_path / "again"
    again.mkdir()
    extras.write(again, "HuggingFaceTokenizer")
    assert read_extras(again) == extras


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
    assert read_extras(second) == read_extras(theirs) == tokenizer.extras
    assert tokenizer.extras.generation == {"eos_token_id": [0, 5], "top_p": 0.9}
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
        (_changed(pad_token={"content": ["<pad>"]}), "pad_token is .*: it must be a token"),
        (_changed(unk_token="\ud800"), "unk_token is '.ud800': it must be a token"),
        (_changed(additional_special_tokens="<a>"), "must be a list of tokens"),
        (_changed(extra_special_tokens={"image": 4}), "extra_special_tokens is 4: it must be a"),
        (_changed(chat_template={"a": "b"}), "chat_template is .*: it must be a text, or a list"),
        (_changed(chat_template=[5]), "chat_template is 5: it must be an object"),
        (_changed(chat_template=[{"name": "a"}]), "must be an object of name and template"),
        (_written(CONFIG, b'{"bos_token": ' + b"[" * 100_000), "is damaged .nested too deeply"),
        (_written("chat_template.jinja", b"\xff"), "chat_template.jinja is damaged .not UTF-8"),
        (_written("generation_config.json", b"[1]"), "it is not a JSON object"),
        (_written("generation_config.json", b"{"), "generation_config.json is damaged .not JSON"),
        (_written("generation_config.json", b'{"eos_token_id": [1, "a"]}'), "eos_token_id is .1, "),
        (_written("generation_config.json", b'{"a": ' + b"9" * 9999 + b"}"), "is damaged .Exceeds"),
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


def test_an_end_that_is_no_text_is_not_believed(tmp_path: Path) -> None:
    small_bpe().save(tmp_path)
    _changed(eos_token="\udfff")(tmp_path)
    assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod == small_bpe().eod
