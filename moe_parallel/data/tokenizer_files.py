"""The files of tokenizers: finding and reading them, with one-line errors.

Every function that reads raises InputError for a file that is missing or not what it should be.
"""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import read_json, read_small

END_OF_DOCUMENT = "<|endoftext|>"

# The configuration in a folder that we write; Hugging Face reads the same file.
CONFIG_FILE = "tokenizer_config.json"

#: The most tokens of a vocabulary.
LARGEST_VOCABULARY = 2**24
_MOST_BYTES = 1 << 30  # of a tokenizer.json
_LONGEST_WORD = 1000  # characters
_MOST_GROWTH = 4096

# Tokens that end a document, by the names that well-known tokenizers give them.
_KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


def existing(name: str | None, tokenizer_type: str, file_in_folder: str) -> Path:
    """The file that --tokenizer-model names: a file itself, or a folder that contains it."""
    if name is None:
        raise InputError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model FILE|FOLDER")
    path = Path(name)
    file = path / file_in_folder if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--tokenizer-model {name}: there is no file {file}; check the path")
    return file


def read_fast(file: Path) -> tokenizers.Tokenizer:
    """Open a tokenizer.json."""
    try:
        return _bounded(tokenizers.Tokenizer.from_buffer(read_small(file, _MOST_BYTES)))
    except BaseException as error:
        if not _is_fault(error):
            raise
        raise InputError(
            f"--tokenizer-model {file} is not a tokenizer.json of the tokenizers library "
            f"({first_line(error)})"
        ) from None


def _bounded(model: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Raises ValueError for numbers and rules by which the library counts or copies without end."""
    largest = max(model.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= LARGEST_VOCABULARY:
        raise ValueError(f"its token {largest} is above {LARGEST_VOCABULARY - 1}, the most")
    word = getattr(model.model, "max_input_chars_per_word", 0)  # takes the cube of it in steps
    if word > _LONGEST_WORD:
        raise ValueError(f"its max_input_chars_per_word {word} is above {_LONGEST_WORD}, the most")
    parts = (model.normalizer, model.post_processor, model.decoder)
    if math.prod(_growth(part) for part in parts if part is not None) > _MOST_GROWTH:
        raise ValueError(f"its rules may make a text more than {_MOST_GROWTH} times as long")
    return model


def _growth(part: Any) -> float:
    """How many times as long a part of a tokenizer may make a text."""
    growth = 1.0

    def count(rule: dict[str, Any]) -> dict[str, Any]:
        nonlocal growth
        if rule.get("type") == "Replace":
            length, replaced = len(rule["content"]), len(rule["pattern"].get("String", ""))
            growth *= max(1, length / replaced) if replaced else 1 + length
        growth *= 1 + len(rule.get("prepend", ""))
        growth *= max(1, sum("Sequence" in piece for piece in rule.get("single", ())))
        return rule

    json.loads(part.__getstate__(), object_hook=count)
    return growth


def _is_fault(error: BaseException) -> bool:
    """Whether the tokenizers library raised it: for a panic, what is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def faults_told() -> Iterator[None]:
    """Convert any error of the tokenizers library about a text to InputError."""
    try:
        yield
    except BaseException as error:
        if not _is_fault(error):
            raise
        raise InputError(
            f"--tokenizer-model: the tokenizer gives up on a text ({first_line(error)}): repair or "
            "simplify the rules in its tokenizer.json, or name another"
        ) from None


def fetch_from_hub(name: str) -> tokenizers.Tokenizer:
    """The tokenizer.json of that name on the hub, or of an earlier download if it has no answer."""
    hub = import_optional("huggingface_hub", f"--tokenizer-model {name}, a name on the hub,")
    unanswered = ask_hub(name, "tokenizer.json")
    try:
        only_here = unanswered is not None
        file = Path(hub.hf_hub_download(name, "tokenizer.json", local_files_only=only_here))
    except Exception as error:  # a download can fail with many kinds of errors
        raise InputError(
            f"--tokenizer-model {name} is neither a local file or folder nor a tokenizer on the "
            f"hub ({first_line(unanswered or error)}): check the name and the network, or give "
            "a local path (HF_HUB_OFFLINE=1 takes only what has been downloaded)"
        ) from None
    return read_fast(file)


def ask_hub(name: str, file: str) -> Exception | None:
    """Why the hub does not provide a file; None if it does.

    Asks once. Without a network, a download would ask six times, for half a minute.
    """
    hub = import_optional("huggingface_hub", f"{name}, a name on the hub,")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, file))
    except Exception as error:  # as above
        return error
    return None


def convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Convert the folder of an older model: vocab.json and merges.txt, without tokenizer.json.

    Code that comes with a folder is never run.
    """
    library = import_optional(
        "transformers", f"--tokenizer-model {folder}, a folder without tokenizer.json,"
    )
    hush_transformers()
    try:
        opened = library.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        return _bounded(opened.backend_tokenizer)
    except BaseException as error:
        if not _is_fault(error):
            raise
        raise InputError(
            f"--tokenizer-model {folder} holds no tokenizer that transformers can open without "
            f"running code of the folder's own ({first_line(error)})"
        ) from None


def hush_transformers() -> None:
    """Let transformers print only errors: our own one-line message is enough."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def first_line(error: BaseException) -> str:
    """The first line of a library's error message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def find_end_of_document(model: tokenizers.Tokenizer, folder: Path, name: object) -> str:
    """The token that the tokenizer's configuration names as eos, else a well-known one."""
    declared = read_config(folder).get("eos_token")
    if isinstance(declared, dict):
        declared = declared.get("content")
    for token in (declared, *_KNOWN_ENDS):
        if isinstance(token, str) and is_text(token) and model.token_to_id(token) is not None:
            return token
    raise InputError(
        f"--tokenizer-model {name} has no token that ends a document: "
        f"name it as eos_token in {CONFIG_FILE} next to it"
    )


def is_text(string: str) -> bool:
    """Whether a string of JSON is Unicode text: it may have halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in string)


def write_config(folder: Path, tokenizer_type: str, **fields: object) -> None:
    """Write what read_config reads."""
    content = {"tokenizer_type": tokenizer_type, **fields}
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a tokenizer's folder; {} if there is none."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    config = read_json(file, "; restore it")
    return config if isinstance(config, dict) else {}
