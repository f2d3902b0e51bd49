"""Tokenizers: text to token ids and back, and the number of bytes of text per token.

Megatron-Core's own wrappers (megatron.core.tokenizers) are not used. They need a metadata file
next to each tokenizer, import every tokenizer library at once, differ between the two supported
versions, and do not know the bytes of a token. Its datasets need only `vocab_size`, `eod` and
`unique_identifiers`, which every tokenizer here has.

Every function that reads a file raises InputError, in one line, for one that is missing or not what
it should be. Code that comes with a tokenizer is never run.
"""

import difflib
import hashlib
import json
import logging
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moe_parallel.config.message import shown
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import first_line, read_json, read_small

END_OF_DOCUMENT = "<|endoftext|>"
# Tokens that end a document, by the names that well-known tokenizers give them.
_KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")

# The configuration in a folder that we write; Hugging Face reads the same file.
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
_TEMPLATE = "chat_template"
_DEFAULT = "default"  # the name of the template in chat_template.jinja
_BOS = "imported_bos_id"  # our own field: other folders do not say what a model here has read

#: Fields of tokenizer_config.json, each of which names one token.
_ONE = ("bos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Fields that name several: a list, or an object from names to tokens.
_SEVERAL = ("additional_special_tokens", "extra_special_tokens")

#: The most tokens of a vocabulary.
LARGEST_VOCABULARY = 2**24
_MOST_BYTES = 1 << 30  # of a tokenizer.json
_LONGEST_WORD = 1000  # characters
_MOST_GROWTH = 4096

#: A token, several, or several that have names.
SpecialToken = str | list[str] | dict[str, str]


@dataclass(frozen=True)
class Extras:
    """What the folder of a tokenizer says to transformers alone, carried from folder to folder.

    Only `bos` is used here. A chat template is a program in Jinja; it is copied as text and never
    run.
    """

    special_tokens: Mapping[str, SpecialToken] = field(default_factory=dict)  # by field
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name
    generation: Mapping[str, Any] | None = None  # the fields of generation_config.json
    bos: int | None = None  # the id that an imported model expects before each text

    def write(self, folder: Path, tokenizer_type: str, **fields: object) -> None:
        """Write tokenizer_config.json, which read_config reads, and generation_config.json."""
        fields = {"tokenizer_type": tokenizer_type, **fields, **self.special_tokens}
        if self.bos is not None:
            fields[_BOS] = self.bos
        templates = self.chat_templates
        if set(templates) == {_DEFAULT}:
            fields[_TEMPLATE] = templates[_DEFAULT]
        elif templates:
            pairs = sorted(templates.items())
            fields[_TEMPLATE] = [{"name": name, "template": text} for name, text in pairs]
        text = json.dumps(fields, indent=1) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        if self.generation is not None:
            text = json.dumps(self.generation, indent=2) + "\n"
            (folder / GENERATION_FILE).write_text(text, encoding="utf-8")


class Tokenizer(ABC):
    """A vocabulary of `vocab_size` tokens. V below is that number.

    Attributes:
        eod: id of the token that ends a document.
        vocab_size: number of ids, special tokens included.
        extras: what its folder says to transformers alone; `save` writes it again.
    """

    eod: int
    vocab_size: int
    extras = Extras()

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`. No special token is added, and none is recognized inside the text."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""

    @cached_property
    @abstractmethod
    def bytes_per_token(self) -> np.ndarray:
        """int64 [V]: UTF-8 bytes of text that each token represents; 0 for special tokens.

        Exact for byte-level BPE: the bytes of a text's tokens add up to the bytes of the text.
        Approximate for others, because of their normalization: a leading space that
        SentencePiece adds, characters folded by NFKC, unknown characters.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write everything that load_tokenizer needs to `folder`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal digest of the vocabulary and rules: equal means equal ids for every text."""

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.tokenize(text) for text in texts]

    @property
    def beginning(self) -> list[int]:
        """The ids that an imported model expects before each text: its BOS, or nothing."""
        return [] if self.extras.bos is None else [self.extras.bos]

    @property
    def before_text(self) -> int:
        """The id that stands before a text that is scored as a whole."""
        return (self.beginning or [self.eod])[-1]

    @property
    def unique_identifiers(self) -> "OrderedDict[str, object]":
        """The values that Megatron's datasets put into the names of their cached indices."""
        return OrderedDict(kind=type(self).__name__, fingerprint=self.fingerprint)


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: ours (byte-level BPE), or a Hugging Face one."""

    def __init__(self, model: tokenizers.Tokenizer, end_of_document: str, kind: str) -> None:
        eod = model.token_to_id(end_of_document)
        assert eod is not None, end_of_document
        # A document that contains the text "<|endoftext|>" must not end there.
        model.encode_special_tokens = True
        # Settings that a tokenizer.json may have for other uses would cut or pad documents.
        model.no_truncation()
        model.no_padding()
        self.model = model
        self.end_of_document = end_of_document
        self.kind = kind
        self.eod = eod
        self.vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values())

    def tokenize(self, text: str) -> list[int]:
        with _faults_told():
            return self.model.encode(text, add_special_tokens=False).ids

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        with _faults_told():
            encodings = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        with _faults_told():
            return self.model.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        # In the byte-level alphabet each character of a token's name represents one byte.
        byte_level = "ByteLevel" in _kinds(json.loads(self.model.to_str())["decoder"])
        length: Callable[[str], int] = len if byte_level else _bytes_of_piece
        for token, i in self.model.get_vocab(with_added_tokens=False).items():
            counts[i] = length(token)
        for i, added in self.model.get_added_tokens_decoder().items():
            counts[i] = 0 if added.special else len(added.content.encode())
        return counts

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The library would raise a bare Exception for a full disk.
        content = self.model.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        # With this class transformers.AutoTokenizer can open the folder, too.
        kind, end = "PreTrainedTokenizerFast", self.end_of_document
        self.extras.write(folder, self.kind, tokenizer_class=kind, eos_token=end)

    @cached_property
    def fingerprint(self) -> str:
        rules = json.loads(self.model.to_str())
        facts = [_without_defaults(rules), self.end_of_document]
        return _digest(json.dumps(facts, sort_keys=True).encode())


class SentencePiece(Tokenizer):
    """A SentencePiece `.model` file."""

    def __init__(self, file: Path) -> None:
        library = import_optional("sentencepiece", "--tokenizer-type SentencePieceTokenizer")
        try:
            self.model = library.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"--tokenizer-model {file} is not a SentencePiece .model file ({first_line(error)})"
            ) from None
        if self.model.eos_id() < 0:
            raise InputError(f"--tokenizer-model {file} has no </s> token to end a document with")
        self.file = file
        self.eod = self.model.eos_id()
        self.vocab_size = self.model.get_piece_size()

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text)

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        # As many threads as the tokenizers library has, which tools/preprocess_data.py limits.
        threads = int(os.environ.get("RAYON_NUM_THREADS", "1"))
        return self.model.encode(list(texts), num_threads=threads)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids])

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        return np.array(
            [
                0
                if self.model.is_control(i) or self.model.is_unknown(i)
                else _bytes_of_piece(self.model.id_to_piece(i))
                for i in range(self.vocab_size)
            ],
            dtype=np.int64,
        )

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.file.resolve() != (folder / "tokenizer.model").resolve():
            shutil.copyfile(self.file, folder / "tokenizer.model")
        self.extras.write(folder, "SentencePieceTokenizer")

    @cached_property
    def fingerprint(self) -> str:
        return _digest(self.model.serialized_model_proto())


class NullTokenizer(Tokenizer):
    """Text that is already numbers, "12 7 9", for synthetic data. The last id ends a document."""

    def __init__(self, vocab_size: int) -> None:
        if not 2 <= vocab_size <= LARGEST_VOCABULARY:
            raise InputError(
                f"--vocab-size is {vocab_size}: NullTokenizer takes 2 to {LARGEST_VOCABULARY}"
            )
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        """Raises InputError for a word that is not the number of a token."""
        return [self._id(word) for word in text.split()]

    def _id(self, word: str) -> int:
        if word.isdecimal() and len(word) < 20 and int(word) < self.vocab_size:
            return int(word)
        raise InputError(
            f"--tokenizer-type NullTokenizer reads numbers from 0 to {self.eod} "
            f"(--vocab-size {self.vocab_size}), not {word[:40]!r}: raise --vocab-size, "
            "or name another tokenizer"
        )

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        """Counts a number and the space after it, so one byte too many at the end of a document."""
        return np.array([len(str(i)) + 1 for i in range(self.eod)] + [0], dtype=np.int64)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        Extras().write(folder, "NullTokenizer", vocab_size=self.vocab_size)

    @property
    def fingerprint(self) -> str:
        return _digest(str(self.vocab_size).encode())


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> FastTokenizer:
    """Train a byte-level BPE: 256 bytes, merges, and `<|endoftext|>`, `vocab_size` ids in all.

    A small text may have fewer merges than that; then the tokenizer's `vocab_size` is smaller.

    Raises:
        InputError: `vocab_size` has no room for the 256 bytes and the end of document, or needs
            more memory than the trainer may use; there is no text.
    """
    if vocab_size < 257:
        raise InputError(
            f"--vocab-size {vocab_size} is too small: a byte-level BPE needs 257 or more"
        )
    if vocab_size > LARGEST_VOCABULARY:  # the library allocates 66 bytes per id, and aborts
        raise InputError(
            f"--vocab-size {vocab_size} is too large to train: give at most {LARGEST_VOCABULARY}"
        )
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_DOCUMENT],
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return FastTokenizer(model, END_OF_DOCUMENT, "ByteLevelBPE")


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None = None
) -> Tokenizer:
    """Open the tokenizer that --tokenizer-type and --tokenizer-model name.

    Args:
        tokenizer_type: ByteLevelBPE, HuggingFaceTokenizer, SentencePieceTokenizer, NullTokenizer.
        tokenizer_model: a folder that save() wrote, a file, or (Hugging Face) a hub name.
        vocab_size: of NullTokenizer; ignored by the others, whose files determine it.

    Raises:
        InputError: an unknown type; a missing or wrong file; a library that is not installed.
    """
    kinds = {
        "ByteLevelBPE": "FILE|FOLDER",
        "HuggingFaceTokenizer": "a folder, a tokenizer.json, or a name on the hub",
        "SentencePieceTokenizer": "FILE|FOLDER",
        "NullTokenizer": "",
    }
    if tokenizer_type not in kinds:
        near = difflib.get_close_matches(tokenizer_type, kinds, n=1, cutoff=0.3)
        meant = f"did you mean {near[0]}?" if near else f"use one of {', '.join(kinds)}"
        raise InputError(f"--tokenizer-type {tokenizer_type} is unknown: {meant}")
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise InputError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    if tokenizer_model is None:
        raise InputError(
            f"--tokenizer-type {tokenizer_type} needs --tokenizer-model: {kinds[tokenizer_type]}"
        )
    path = Path(tokenizer_model)
    folder = path if path.is_dir() else path.parent
    tokenizer: Tokenizer
    if tokenizer_type == "SentencePieceTokenizer":
        tokenizer = SentencePiece(_existing(path, "tokenizer.model"))
    elif tokenizer_type == "ByteLevelBPE":
        file = _existing(path, "tokenizer.json")
        model = _read_fast(file)
        if "ByteLevel" not in _kinds(json.loads(model.to_str())["decoder"]):
            raise InputError(
                f"--tokenizer-model {file} is not a byte-level BPE: "
                "open it with --tokenizer-type HuggingFaceTokenizer"
            )
        tokenizer = FastTokenizer(model, _end_of_document(model, folder, file), tokenizer_type)
    else:
        if path.is_dir() and not (path / "tokenizer.json").exists():
            model = _converted(path)
        elif path.exists():
            model = _read_fast(path / "tokenizer.json" if path.is_dir() else path)
        else:
            model, folder = _fetched(tokenizer_model), path
        tokenizer = FastTokenizer(
            model, _end_of_document(model, folder, tokenizer_model), tokenizer_type
        )
    tokenizer.extras = read_extras(folder)
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """Open a folder that Tokenizer.save wrote, of any type.

    Raises:
        InputError: the folder is not such a folder.
    """
    config = read_config(folder)
    kind, vocab_size = config.get("tokenizer_type"), config.get("vocab_size")
    if not isinstance(kind, str) or not isinstance(vocab_size, int | None):
        raise InputError(f"{folder} is not a tokenizer folder: it has no {CONFIG_FILE} of ours")
    return build_tokenizer(kind, str(folder), vocab_size)


def _kinds(part: dict[str, Any] | None) -> set[str]:
    """Names of a decoder and of the decoders in its sequence."""
    if part is None:
        return set()
    return {part["type"]}.union(*(_kinds(inner) for inner in part.get("decoders", [])))


def _without_defaults(part: Any) -> Any:
    """Rules without options that are off, so that a library with more options gives the same."""
    if isinstance(part, list):
        return [_without_defaults(each) for each in part]
    if isinstance(part, dict):
        on = ((k, value) for k, value in part.items() if value is not None and value is not False)
        return {key: _without_defaults(value) for key, value in on}
    return part


def _bytes_of_piece(piece: str) -> int:
    """Bytes of a SentencePiece or WordPiece token: "▁" is a space, "<0x0A>" one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.removeprefix("##").replace("▁", " ").encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _existing(path: Path, name: str) -> Path:
    """The file that --tokenizer-model names: a file itself, or a folder that contains it."""
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--tokenizer-model {path}: there is no file {file}; check the path")
    return file


def _read_fast(file: Path) -> tokenizers.Tokenizer:
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
def _faults_told() -> Iterator[None]:
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


def _fetched(name: str) -> tokenizers.Tokenizer:
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
    return _read_fast(file)


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


def _converted(folder: Path) -> tokenizers.Tokenizer:
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


def _end_of_document(model: tokenizers.Tokenizer, folder: Path, name: object) -> str:
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


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a tokenizer's folder; {} if there is none."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    config = read_json(file, "; restore it")
    return config if isinstance(config, dict) else {}


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
    main, wrong = folder / "chat_template.jinja", "an object of name and template"
    files = {_DEFAULT: main} if main.is_file() else {}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files |= {path.stem: path for path in more}
    if files:
        return {name: _text(path) for name, path in files.items()}
    value, found = config.get(_TEMPLATE), {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    if not isinstance(value, list | None):
        raise _wrong(folder / CONFIG_FILE, _TEMPLATE, value, "a text, or a list")
    for each in value or []:
        name, text = map(each.get, ("name", "template")) if isinstance(each, dict) else (None, None)
        if not (isinstance(name, str) and isinstance(text, str)):
            raise _wrong(folder / CONFIG_FILE, _TEMPLATE, each, wrong)
        found[name] = text
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
