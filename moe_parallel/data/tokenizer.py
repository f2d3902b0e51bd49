"""Tokenizers: text to token ids and back, and the number of bytes of text per token.

Megatron-Core's own wrappers (megatron.core.tokenizers) are not used. They need a metadata file
next to each tokenizer, import every tokenizer library at once, differ between the two supported
versions, and do not know the bytes of a token. Its datasets need only `vocab_size`, `eod` and
`unique_identifiers`, which every tokenizer here has.
"""

import difflib
import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moe_parallel.data.tokenizer_extras import Extras, read_extras
from moe_parallel.data.tokenizer_files import (
    CONFIG_FILE,
    END_OF_DOCUMENT,
    LARGEST_VOCABULARY,
    convert_with_transformers,
    existing,
    faults_told,
    fetch_from_hub,
    find_end_of_document,
    first_line,
    read_config,
    read_fast,
    write_config,
)
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional

_T = TypeVar("_T", bound="Tokenizer")


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

    def check(self, text: str) -> None:
        """Raise InputError for a text that has no ids. Most tokenizers have ids for every text."""
        return None

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
        with faults_told():
            return self.model.encode(text, add_special_tokens=False).ids

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        with faults_told():
            encodings = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        with faults_told():
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
        write_config(
            folder,
            self.kind,
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token=self.end_of_document,
            **self.extras.fields,
        )
        self.extras.write_generation(folder)

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
        # One thread, not one for each core: tools/preprocess_data.py has --workers processes.
        return self.model.encode(list(texts), num_threads=1)

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
        write_config(folder, "SentencePieceTokenizer", **self.extras.fields)
        self.extras.write_generation(folder)

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

    def check(self, text: str) -> None:
        self.tokenize(text)

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
        write_config(folder, "NullTokenizer", vocab_size=self.vocab_size)

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
    builders: dict[str, Callable[[str | None, int | None], Tokenizer]] = {
        "ByteLevelBPE": _open_byte_bpe,
        "HuggingFaceTokenizer": _open_hugging_face,
        "SentencePieceTokenizer": _open_sentence_piece,
        "NullTokenizer": _open_null,
    }
    if tokenizer_type not in builders:
        near = difflib.get_close_matches(tokenizer_type, builders, n=1, cutoff=0.3)
        meant = f"did you mean {near[0]}?" if near else f"use one of {', '.join(builders)}"
        raise InputError(f"--tokenizer-type {tokenizer_type} is unknown: {meant}")
    return builders[tokenizer_type](tokenizer_model, vocab_size)


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


def _open_byte_bpe(name: str | None, vocab_size: int | None) -> FastTokenizer:
    file = existing(name, "ByteLevelBPE", "tokenizer.json")
    model = read_fast(file)
    if "ByteLevel" not in _kinds(json.loads(model.to_str())["decoder"]):
        raise InputError(
            f"--tokenizer-model {file} is not a byte-level BPE: "
            "open it with --tokenizer-type HuggingFaceTokenizer"
        )
    end = find_end_of_document(model, file.parent, file)
    return _with_extras(FastTokenizer(model, end, "ByteLevelBPE"), file.parent)


def _open_hugging_face(name: str | None, vocab_size: int | None) -> FastTokenizer:
    if name is None:
        raise InputError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: "
            "a folder, a tokenizer.json, or a name on the hub"
        )
    path = Path(name)
    folder = path.parent if path.is_file() else path
    if path.is_dir() and not (path / "tokenizer.json").exists():
        model = convert_with_transformers(path)
    elif path.exists():
        model = read_fast(path / "tokenizer.json" if path.is_dir() else path)
    else:
        model = fetch_from_hub(name)
    end = find_end_of_document(model, folder, name)
    return _with_extras(FastTokenizer(model, end, "HuggingFaceTokenizer"), folder)


def _open_sentence_piece(name: str | None, vocab_size: int | None) -> SentencePiece:
    file = existing(name, "SentencePieceTokenizer", "tokenizer.model")
    return _with_extras(SentencePiece(file), file.parent)


def _with_extras(tokenizer: _T, folder: Path) -> _T:
    tokenizer.extras = read_extras(folder)
    return tokenizer


def _open_null(name: str | None, vocab_size: int | None) -> NullTokenizer:
    if vocab_size is None:
        raise InputError("--tokenizer-type NullTokenizer needs --vocab-size")
    return NullTokenizer(vocab_size)


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
