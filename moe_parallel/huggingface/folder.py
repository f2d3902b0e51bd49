"""A folder of safetensors that transformers wrote: its tensors, one at a time.

    model.safetensors                                   all tensors, or
    model.safetensors.index.json, model-0000N-of-....   several files, and which has which tensor

The files are mapped into memory, and a tensor is copied from there when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from moe_parallel.config.message import shown
from moe_parallel.errors import InputError
from moe_parallel.huggingface.places import TensorPlace, TensorShape
from moe_parallel.optional import import_optional
from moe_parallel.reading import read_json

ONE_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: Tensors of old versions that a model computes itself.
_COMPUTED = (".rotary_emb.inv_freq",)
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Described:
    """A tensor as the header of its file describes it."""

    file: str
    shape: TensorShape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class TensorFolder:
    """The tensors of a folder. Use it in a `with` statement, which closes the files."""

    def __init__(self, folder: Path) -> None:
        """Open every file and read its header.

        Raises InputError, in one line, for a file that is missing, damaged, of pickles, or of
        other types than floating-point numbers of 16 or 32 bits.
        """
        self.folder = folder
        self.not_finite: set[str] = set()  # of the tensors that were read
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        with self._stack:
            files, indexed = _files(folder)
            for file in files:
                self._files[file] = self._stack.enter_context(_opened(folder / file))
            self.described = self._describe()
            self._check_index(indexed)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """A tensor, of its own dtype, on the CPU."""
        file = self.described[name].file
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except Exception as error:  # the library's own class is not one of a kind
            raise InputError(f"{self.folder / file}: {name} cannot be read ({error})") from None
        if not tensor.isfinite().all():
            self.not_finite.add(name)
        return tensor

    def check(self, places: Iterable[TensorPlace]) -> None:
        """Compare the tensors with those that a model needs.

        Raises InputError for the first that is missing, of another shape, or not of the model.
        """
        needed: set[str] = set()
        # One by one: a config.json may tell of more layers than there is memory for their names.
        pairs = (pair for each in places for pair in zip(each.names, each.shapes, strict=True))
        for name, shape in pairs:
            needed.add(name)
            if name not in self.described:
                raise InputError(
                    f"--input {self.folder}: {name} is missing, which the model of its config.json "
                    "has: fetch the folder again"
                )
            found = self.described[name].shape
            if found != shape:
                raise InputError(
                    f"--input {self.folder}: {name} is {list(found)}, and by config.json it is "
                    f"{list(shape)}: weights and config.json are of different models"
                )
        for name in self.described:
            if name not in needed and not self._is_computed(name):
                raise InputError(
                    f"--input {self.folder}: {name[:200]} is a tensor that the model of its "
                    "config.json does not have: weights and config.json are of different models"
                )

    def _is_computed(self, name: str) -> bool:
        """Whether a tensor is not a weight of its own."""
        if name.endswith(_COMPUTED):
            return True
        embedding = "model.embed_tokens.weight"
        if name != "lm_head.weight" or embedding not in self.described:
            return False
        # A tied output layer may be written too; it must then be the embedding.
        same = self.described[name].shape == self.described[embedding].shape
        return same and torch.equal(self.read(name), self.read(embedding))

    def _describe(self) -> dict[str, Described]:
        found: dict[str, Described] = {}
        for file, opened in self._files.items():
            for name in opened.keys():
                part = opened.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None and not name.endswith(_COMPUTED):
                    raise InputError(
                        f"{self.folder / file}: {name} is of type {part.get_dtype()}: only F32, "
                        "BF16 and F16 are known"
                    )
                if name in found:
                    raise InputError(
                        f"--input {self.folder}: both {found[name].file} and {file} have {name}: "
                        "remove the files of another model"
                    )
                shape = tuple(part.get_shape())
                found[name] = Described(file, shape, dtype or torch.float32)
        return found

    def _check_index(self, indexed: Mapping[str, str]) -> None:
        for name, file in indexed.items():
            if name not in self.described or self.described[name].file != file:
                raise InputError(
                    f"{self.folder / file} has no {name[:200]}, which {WEIGHT_INDEX} says: fetch "
                    "the folder again"
                )


def _files(folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """The files of tensors, and from each name in the index its file."""
    if not folder.is_dir():
        raise InputError(f"--input {folder}: there is no such folder; check the path")
    if (folder / WEIGHT_INDEX).is_file():
        indexed = _read_index(folder / WEIGHT_INDEX)
        return sorted(set(indexed.values())), indexed
    if (folder / ONE_FILE).is_file():
        return [ONE_FILE], {}
    if any((folder / name).is_file() for name in _PICKLES):
        raise InputError(
            f"--input {folder}: its weights are pickles, which may run code and are not read: "
            "save them with save_pretrained, which writes safetensors"
        )
    raise InputError(
        f"--input {folder}: it has neither {ONE_FILE} nor {WEIGHT_INDEX}: name a folder that "
        "save_pretrained wrote"
    )


def _read_index(path: Path) -> dict[str, str]:
    content = read_json(path, ": fetch it again")
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise InputError(f"{path} is damaged (it has no weight_map): fetch it again")
    for file in names.values():
        # A name with a folder in it could be any file of this machine.
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise InputError(f"{path} names the file {shown(file)}: it must be one next to it")
        if not (path.parent / file).is_file():
            raise InputError(f"{path.parent / file} is missing, which {path.name} names: fetch it")
    return names


def _opened(path: Path) -> Any:
    library = import_optional("safetensors", f"--input {path.parent}")
    try:
        return library.safe_open(str(path), framework="pt")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from None
    except Exception as error:  # the library's own class is not one of a kind
        raise InputError(
            f"{path} is incomplete or not a file of safetensors ({error}): fetch it again"
        ) from None
