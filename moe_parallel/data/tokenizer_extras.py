"""What the folder of a tokenizer says to transformers alone, carried from one folder to the next.

These are the special tokens besides the end of a document, chat templates, and
`generation_config.json`. Of these only the token that begins each text of an imported model is used
here. A chat template is a program in Jinja; it is copied as text and never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_parallel.config.message import shown
from moe_parallel.data.tokenizer_files import CONFIG_FILE, is_text, read_config
from moe_parallel.errors import InputError
from moe_parallel.reading import read_json, read_small

GENERATION_FILE = "generation_config.json"
TEMPLATE = "chat_template"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates"
_BOS = "imported_bos_id"  # our own field: other folders do not say what a model here has read
_DEFAULT = "default"  # the name of the template in _TEMPLATE_FILE

#: Fields of tokenizer_config.json, each of which names one token.
_ONE = ("bos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Fields that name several: a list, or an object from names to tokens.
_SEVERAL = ("additional_special_tokens", "extra_special_tokens")

#: A token, several, or several that have names.
SpecialToken = str | list[str] | dict[str, str]


@dataclass(frozen=True)
class Extras:
    """What is carried."""

    special_tokens: Mapping[str, SpecialToken] = field(default_factory=dict)  # by field
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name
    generation: Mapping[str, Any] | None = None  # the fields of generation_config.json
    bos: int | None = None  # the id that an imported model expects before each text

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of tokenizer_config.json, as transformers reads them."""
        fields: dict[str, Any] = dict(self.special_tokens)
        if self.bos is not None:
            fields[_BOS] = self.bos
        templates = self.chat_templates
        if set(templates) == {_DEFAULT}:
            fields[TEMPLATE] = templates[_DEFAULT]
        elif templates:
            pairs = sorted(templates.items())
            fields[TEMPLATE] = [{"name": name, "template": text} for name, text in pairs]
        return fields

    def write_generation(self, folder: Path) -> None:
        """Write generation_config.json to `folder`, if there is one."""
        if self.generation is not None:
            text = json.dumps(self.generation, indent=2) + "\n"
            (folder / GENERATION_FILE).write_text(text, encoding="utf-8")


def read_extras(folder: Path) -> Extras:
    """The extras of a tokenizer's folder, which may have none.

    Raises InputError, in one line, for a field or a file that is not what it should be.
    """
    file, config = folder / CONFIG_FILE, read_config(folder)
    tokens: dict[str, SpecialToken] = {}
    for name in _ONE:
        if config.get(name) is not None:
            tokens[name] = _token(file, name, config[name])
    for name in _SEVERAL:
        several = config.get(name)
        if isinstance(several, list):
            tokens[name] = [_token(file, name, each) for each in several]
        elif isinstance(several, dict) and name == "extra_special_tokens":
            tokens[name] = {key: _token(file, name, each) for key, each in several.items()}
        elif several is not None:
            raise _wrong(file, name, several, "a list of tokens")
    bos = config.get(_BOS)
    if type(bos) is not int or bos < 0:
        bos = None
    return Extras(tokens, _templates(folder, config), _generation(folder / GENERATION_FILE), bos)


def _token(file: Path, name: str, value: Any) -> str:
    """A token: its text, or an object that has the text as `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not is_text(text):
        raise _wrong(file, name, value, "a token")
    return text


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Those of files instead of those in tokenizer_config.json, as transformers reads them."""
    files = {_DEFAULT: folder / _TEMPLATE_FILE} if (folder / _TEMPLATE_FILE).is_file() else {}
    more = sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))
    files |= {path.stem: path for path in more}
    if files:
        return {name: _text(path) for name, path in files.items()}
    value, found = config.get(TEMPLATE), {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    for each in value if isinstance(value, list) else []:
        if not isinstance(each, dict):
            raise _wrong(folder / CONFIG_FILE, TEMPLATE, each, "an object of name and template")
        name, text = each.get("name"), each.get("template")
        if not (isinstance(name, str) and isinstance(text, str)):
            raise _wrong(folder / CONFIG_FILE, TEMPLATE, each, "an object of name and template")
        found[name] = text
    if not isinstance(value, list | None):
        raise _wrong(folder / CONFIG_FILE, TEMPLATE, value, "a text, or a list")
    return found


def _text(path: Path) -> str:
    try:
        return read_small(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged (not UTF-8 at byte {error.start + 1})") from None
    except ValueError as error:
        raise InputError(f"{path} is {error}: fetch it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None


def _generation(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    fields = read_json(file, ": fetch it again")
    if not isinstance(fields, dict):
        raise InputError(f"{file} is not a configuration: it is not a JSON object")
    if not all(type(each) is int for each in ends_of(fields)):
        wrong = fields["eos_token_id"]
        raise _wrong(file, "eos_token_id", wrong, "an integer, or a list of integers")
    return fields


def ends_of(generation: Mapping[str, Any]) -> list[Any]:
    """The ids of the tokens that end a text, by the fields of generation_config.json."""
    ends = generation.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _wrong(file: Path, name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{file}: {name} is {shown(value)}: it must be {expected}")
