"""Tokenizers: text to token ids and back, and how many bytes of text each token stands for.

Megatron-Core's own wrappers (megatron.core.tokenizers) are not used: they want a metadata file
beside each tokenizer, import every tokenizer library at once, differ between the two supported
versions, and do not know the bytes of a token. Its datasets need only `vocab_size`, `eod` and
`unique_identifiers`, which every tokenizer here has.
"""

import difflib
import hashlib
import importlib
import json
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moe_parallel.errors import InputError

END_OF_DOCUMENT = "<|endoftext|>"

# What a folder of ours says about itself; Hugging Face reads the same file.
CONFIG_FILE = "tokenizer_config.json"

# Tokens that end a document, by the name that well-known tokenizers give them.
_KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(ABC):
    """A vocabulary of `vocab_size` tokens. V below is that number.

    Attributes:
        eod: id of the token that ends a document.
        vocab_size: number of ids, special tokens included.
    """

    eod: int
    vocab_size: int

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`. No special token is added, and none is recognised inside the text."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""

    @cached_property
    @abstractmethod
    def bytes_per_token(self) -> np.ndarray:
        """int64 [V]: UTF-8 bytes of text that each token stands for; 0 for special tokens.

        Exact for byte-level BPE: the bytes of a text's tokens add up to the bytes of the text.
        Approximate for others, by what their normalisation changes: a leading space that
        SentencePiece adds, characters folded by NFKC, unknown characters.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write into `folder` everything that load_tokenizer needs."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal digest of the vocabulary and rules: equal means same ids for every text."""

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.tokenize(text) for text in texts]

    @property
    def unique_identifiers(self) -> "OrderedDict[str, object]":
        """What Megatron's datasets put into the name of their cached indices."""
        return OrderedDict(kind=type(self).__name__, fingerprint=self.fingerprint)


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: ours (byte-level BPE), or a Hugging Face one."""

    def __init__(self, model: tokenizers.Tokenizer, end_of_document: str, kind: str) -> None:
        eod = model.token_to_id(end_of_document)
        assert eod is not None, end_of_document
        # A document that spells out "<|endoftext|>" must not end there.
        model.encode_special_tokens = True
        # Settings that a tokenizer.json may carry for other uses would cut or fill documents.
        model.no_truncation()
        model.no_padding()
        self.model = model
        self.end_of_document = end_of_document
        self.kind = kind
        self.eod = eod
        self.vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values())

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text, add_special_tokens=False).ids

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        # In the byte-level alphabet a character of the token's name stands for one byte.
        byte_level = "ByteLevel" in _kinds(json.loads(self.model.to_str())["decoder"])
        length: Callable[[str], int] = len if byte_level else _bytes_of_piece
        for token, i in self.model.get_vocab(with_added_tokens=False).items():
            counts[i] = length(token)
        for i, added in self.model.get_added_tokens_decoder().items():
            counts[i] = 0 if added.special else len(added.content.encode())
        return counts

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save(str(folder / "tokenizer.json"))
        # The class lets transformers.AutoTokenizer open the folder as well.
        _write_config(
            folder,
            self.kind,
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token=self.end_of_document,
        )

    @cached_property
    def fingerprint(self) -> str:
        return _digest((self.model.to_str() + self.end_of_document).encode())


class SentencePiece(Tokenizer):
    """A SentencePiece `.model` file."""

    def __init__(self, file: Path) -> None:
        library = _optional("sentencepiece", "SentencePieceTokenizer")
        try:
            self.model = library.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"--tokenizer-model {file} is not a SentencePiece .model file ({error})"
            ) from None
        if self.model.eos_id() < 0:
            raise InputError(f"--tokenizer-model {file} has no </s> token to end a document with")
        self.file = file
        self.eod = self.model.eos_id()
        self.vocab_size = self.model.get_piece_size()

    def tokenize(self, text: str) -> list[int]:
        return self.model.encode(text)

    def tokenize_all(self, texts: Sequence[str]) -> list[list[int]]:
        return self.model.encode(list(texts))

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
        _write_config(folder, "SentencePieceTokenizer")

    @cached_property
    def fingerprint(self) -> str:
        return _digest(self.model.serialized_model_proto())


class NullTokenizer(Tokenizer):
    """Text that is already numbers, "12 7 9": for synthetic data. The last id ends a document."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise InputError(f"--vocab-size {vocab_size} is too small for NullTokenizer: use >= 2")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        """A number and the space after it, so one byte too many at the end of a document."""
        return np.array([len(str(i)) + 1 for i in range(self.eod)] + [0], dtype=np.int64)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, "NullTokenizer", vocab_size=self.vocab_size)

    @property
    def fingerprint(self) -> str:
        return _digest(str(self.vocab_size).encode())


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> FastTokenizer:
    """Train a byte-level BPE: 256 bytes, merges, and `<|endoftext|>`, `vocab_size` ids in all.

    A small text may hold fewer merges than that; the tokenizer's own `vocab_size` then says so.

    Raises:
        InputError: `vocab_size` has no room for the 256 bytes and the end of document.
    """
    if vocab_size < 257:
        raise InputError(
            f"--vocab-size {vocab_size} is too small: a byte-level BPE needs 257 or more"
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
        vocab_size: what NullTokenizer takes; ignored by the others, which know their own.

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
    """Open a folder that Tokenizer.save wrote, of whatever type.

    Raises:
        InputError: the folder is not one of those.
    """
    config = _read_config(folder)
    if "tokenizer_type" not in config:
        raise InputError(f"{folder} is not a tokenizer folder: it has no {CONFIG_FILE} of ours")
    return build_tokenizer(config["tokenizer_type"], str(folder), config.get("vocab_size"))


def _open_byte_bpe(name: str | None, vocab_size: int | None) -> FastTokenizer:
    file = _existing(name, "ByteLevelBPE", "tokenizer.json")
    model = _read_fast(file)
    if "ByteLevel" not in _kinds(json.loads(model.to_str())["decoder"]):
        raise InputError(
            f"--tokenizer-model {file} is not a byte-level BPE: "
            "open it with --tokenizer-type HuggingFaceTokenizer"
        )
    return FastTokenizer(model, _end_of_document(model, file.parent, file), "ByteLevelBPE")


def _open_hugging_face(name: str | None, vocab_size: int | None) -> FastTokenizer:
    if name is None:
        raise InputError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: "
            "a folder, a tokenizer.json, or a name on the hub"
        )
    path = Path(name)
    folder = path.parent if path.is_file() else path
    if path.is_dir() and not (path / "tokenizer.json").exists():
        model = _convert_with_transformers(path)
    elif path.exists():
        model = _read_fast(path / "tokenizer.json" if path.is_dir() else path)
    else:
        model = _fetch_from_hub(name)
    return FastTokenizer(model, _end_of_document(model, folder, name), "HuggingFaceTokenizer")


def _open_sentence_piece(name: str | None, vocab_size: int | None) -> SentencePiece:
    return SentencePiece(_existing(name, "SentencePieceTokenizer", "tokenizer.model"))


def _open_null(name: str | None, vocab_size: int | None) -> NullTokenizer:
    if vocab_size is None:
        raise InputError("--tokenizer-type NullTokenizer needs --vocab-size")
    return NullTokenizer(vocab_size)


def _existing(name: str | None, tokenizer_type: str, file_in_folder: str) -> Path:
    """The file meant by a --tokenizer-model that is a file, or a folder that holds one."""
    if name is None:
        raise InputError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model FILE|FOLDER")
    path = Path(name)
    file = path / file_in_folder if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--tokenizer-model {name}: there is no file {file}; check the path")
    return file


def _read_fast(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a file it cannot parse
        raise InputError(
            f"--tokenizer-model {file} is not a tokenizer.json of the tokenizers library ({error})"
        ) from None


def _fetch_from_hub(name: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # as many kinds as there are ways for a download to fail
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"--tokenizer-model {name} is neither a file or folder here nor a tokenizer "
            f"that the hub gives ({reason}); check the path or name"
        ) from None


def _convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Folders of older models hold vocab.json and merges.txt, and no tokenizer.json."""
    library = _optional("transformers", "HuggingFaceTokenizer (a folder without tokenizer.json)")
    try:
        return library.AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:
        raise InputError(
            f"--tokenizer-model {folder} holds no tokenizer that transformers can open "
            f"({str(error).splitlines()[0]})"
        ) from None


def _end_of_document(model: tokenizers.Tokenizer, folder: Path, name: object) -> str:
    """The token that the tokenizer's configuration calls eos, else a well-known one."""
    declared = _read_config(folder).get("eos_token")
    if isinstance(declared, dict):
        declared = declared.get("content")
    for token in (declared, *_KNOWN_ENDS):
        if token is not None and model.token_to_id(token) is not None:
            return token
    raise InputError(
        f"--tokenizer-model {name} has no token that ends a document: "
        f"name it as eos_token in {CONFIG_FILE} beside it"
    )


def _write_config(folder: Path, tokenizer_type: str, **fields: object) -> None:
    content = {"tokenizer_type": tokenizer_type, **fields}
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise InputError(f"{file} is not JSON; restore it") from None
    return config if isinstance(config, dict) else {}


def _kinds(part: dict[str, Any] | None) -> set[str]:
    """Names of a decoder and of the decoders in its sequence."""
    if part is None:
        return set()
    return {part["type"]}.union(*(_kinds(inner) for inner in part.get("decoders", [])))


def _bytes_of_piece(piece: str) -> int:
    """Bytes of a SentencePiece or WordPiece token: "▁" is a space, "<0x0A>" one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.removeprefix("##").replace("▁", " ").encode())


def _optional(module: str, wanted_by: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # installed but broken: its own error says more than ours
        raise InputError(
            f"--tokenizer-type {wanted_by} needs {module}: pip install {module}"
        ) from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
