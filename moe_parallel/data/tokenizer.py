"""Tokenizers: text to token ids and back, and the number of bytes of text per token.

Megatron-Core's own wrappers (megatron.core.tokenizers) are not used. They need a metadata file
next to each tokenizer, import every tokenizer library at once, differ between the two supported
versions, and do not know the bytes of a token. Its datasets need only `vocab_size`, `eod` and
`unique_identifiers`, which every tokenizer here has.

Every function that reads a file raises InputError, in one line, for one that is missing or not what
it should be. Code that comes with a tokenizer is never run.
"""

import hashlib
import json
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
_BOS = "imported_bos_id"  # our own field: other folders do not say what a model here has read

#: Fields of tokenizer_config.json that name tokens.
_SPECIAL = (
    "bos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens",
)  # fmt: skip

#: The most tokens of a vocabulary.
LARGEST_VOCABULARY = 2**24
_MOST_BYTES = 1 << 30  # of a tokenizer.json

#: A token, several, or several that have names.
SpecialToken = str | list[str] | dict[str, str]


@dataclass(frozen=True)
class Extras:
    """What the folder of a tokenizer says to transformers alone, carried from folder to folder.

    Only `bos` is used here. A chat template is a program in Jinja; it is copied as text and never
    run.
    """

    special_tokens: Mapping[str, SpecialToken] = field(default_factory=dict)  # by field
    chat_template: Any = None  # a text, or a list of objects of name and template
    generation: Mapping[str, Any] | None = None  # the fields of generation_config.json
    bos: int | None = None  # the id that an imported model expects before each text

    def write(self, folder: Path, tokenizer_type: str, **fields: object) -> None:
        """Write tokenizer_config.json, which read_config reads, and generation_config.json."""
        fields = {"tokenizer_type": tokenizer_type, **fields, **self.special_tokens}
        if self.bos is not None:
            fields[_BOS] = self.bos
        if self.chat_template is not None:
            fields["chat_template"] = self.chat_template
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
        with _told(f"--tokenizer-model {file} is not a SentencePiece .model file"):
            self.model = library.SentencePieceProcessor(model_file=str(file))
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
    kinds = ("ByteLevelBPE", "HuggingFaceTokenizer", "SentencePieceTokenizer", "NullTokenizer")
    if tokenizer_type not in kinds:
        raise InputError(
            f"--tokenizer-type {tokenizer_type} is unknown: use one of {', '.join(kinds)}"
        )
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise InputError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    if tokenizer_model is None:
        hub = ", or a name on the hub" if tokenizer_type == "HuggingFaceTokenizer" else ""
        raise InputError(
            f"--tokenizer-type {tokenizer_type} needs --tokenizer-model: a file or folder{hub}"
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
    with _told(f"--tokenizer-model {file} is not a tokenizer.json of the tokenizers library"):
        return _bounded(tokenizers.Tokenizer.from_buffer(read_small(file, _MOST_BYTES)))


def _bounded(model: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Raises ValueError for ids that no vocabulary needs: each takes memory, used or not."""
    largest = max(model.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= LARGEST_VOCABULARY:
        raise ValueError(f"its token {largest} is above {LARGEST_VOCABULARY - 1}, the most")
    return model


@contextmanager
def _told(wrong: str, remedy: str = "") -> Iterator[None]:
    """Convert any error of a library to InputError, also a panic, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{wrong} ({first_line(error)}){remedy}") from None


def _faults_told() -> AbstractContextManager[None]:
    return _told(
        "--tokenizer-model: the tokenizer gives up on a text",
        ": repair or simplify the rules in its tokenizer.json, or name another",
    )


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
    with _told(
        f"--tokenizer-model {folder} holds no tokenizer that transformers can open without running "
        "code of the folder's own"
    ):
        opened = library.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        return _bounded(opened.backend_tokenizer)


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
    tokens = {
        name: _special(file, name, config[name])
        for name in _SPECIAL
        if config.get(name) is not None
    }
    template = config.get("chat_template")
    if (path := folder / "chat_template.jinja").is_file():  # before the field, as in transformers
        try:
            template = read_small(path).decode("utf-8")
        except (OSError, ValueError) as error:
            reason = first_line(error)
            raise InputError(f"{path} is damaged ({reason}): fetch it again") from None
    if not isinstance(template, str | list | None):
        wrong = shown(template)
        raise InputError(f"{file}: chat_template is {wrong}: it must be a text, or a list")
    generation: Any = None
    if (path := folder / GENERATION_FILE).is_file():
        generation = read_json(path, ": fetch it again")
        if not isinstance(generation, dict):
            raise InputError(f"{path} is not a configuration: it is not a JSON object")
        if not all(type(each) is int for each in ends_of(generation)):
            wrong = shown(generation["eos_token_id"])
            raise InputError(f"{path}: eos_token_id is {wrong}: it must be one or several integers")
    bos = config.get(_BOS)
    bos = bos if type(bos) is int and bos >= 0 else None
    return Extras(tokens, template, generation, bos)


def _special(file: Path, name: str, value: Any) -> Any:
    """A token, or several. A token is its text, or an object that has the text as `content`."""
    if isinstance(value, dict) and "content" in value:
        value = value["content"]
    if isinstance(value, list) and name.endswith("_special_tokens"):
        return [_special(file, f"{name}[]", each) for each in value]
    if isinstance(value, dict) and name == "extra_special_tokens":
        return {key: _special(file, f"{name}[]", each) for key, each in value.items()}
    if not isinstance(value, str) or not is_text(value):
        raise InputError(f"{file}: {name} is {shown(value)}: it must be a token, or several")
    return value


def ends_of(generation: Mapping[str, Any]) -> list[Any]:
    """The ids of the tokens that end a text, by the fields of generation_config.json."""
    ends = generation.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
