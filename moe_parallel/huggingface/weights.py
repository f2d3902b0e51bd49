"""Tensors in files of safetensors: read from a folder, and written to one.

model.safetensors                                   if one file holds all, otherwise
model.safetensors.index.json, model-0000N-of-0000M.safetensors

A folder's files are mapped into memory, and a tensor is copied from there when it is asked for. An
export has the tensors of one file in memory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_parallel.collective_errors import one_line
from moe_parallel.config.message import shown
from moe_parallel.data.atomic_files import atomic_folder, locked
from moe_parallel.errors import InputError
from moe_parallel.huggingface.tensors import Step, TensorPlace, Tensors, TensorShape
from moe_parallel.optional import import_optional
from moe_parallel.reading import read_json
from moe_parallel.training.checkpoint.index import Entries, read_index, tensor_entries
from moe_parallel.training.checkpoint.optimizer import MASTER
from moe_parallel.training.checkpoint.tensors import read_whole

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
        return self.dtype.itemsize * math.prod(self.shape)


class TensorFolder:
    """The tensors of a folder. Use it in a `with` statement, which closes the files."""

    def __init__(self, folder: Path) -> None:
        """Open every file and read its header.

        Raises InputError, in one line, for a file that is missing, damaged, of pickles, or of
        other types than floating-point numbers of 16 or 32 bits.
        """
        self.folder = folder
        files, indexed = _files(folder)
        with ExitStack() as stack:
            self._files = {file: stack.enter_context(_opened(folder / file)) for file in files}
            self.described = self._describe()
            for name, file in indexed.items():
                if name not in self.described or self.described[name].file != file:
                    raise InputError(
                        f"{folder / file} has no {name[:200]}, which {WEIGHT_INDEX} says: fetch "
                        "the folder again"
                    )
            self._stack = stack.pop_all()

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.described.values())

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        return self.described[name].dtype

    def read(self, name: str) -> torch.Tensor:
        """A tensor, of its own dtype, on the CPU."""
        file = self.described[name].file
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except Exception as error:  # the library's own class is not one of a kind
            raise InputError(f"{self.folder / file}: {name} cannot be read ({error})") from None
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


#: The tensors of a checkpoint that are not weights: the optimizer's state, and that of balancing.
_OPTIMIZER = "optimizer."
_BALANCING = (".load.share_E", ".bias.error_E", ".bias.weight_1", ".controller.state")


@dataclass(frozen=True)
class Written:
    """What was written."""

    parameters: int  # without tables of integers
    size: int  # bytes of all tensors
    dtype: str  # of the embedding, as torch names it
    files: list[str]


def checked_entries(steps: Sequence[Step], checkpoint: Path) -> Entries:
    """The entries of the checkpoint's index, after a comparison with what the steps read.

    Raises InputError for the first tensor that is missing, of another shape, or not of the model,
    and StorageError if the index cannot be read.
    """
    entries = tensor_entries(read_index(checkpoint))
    wanted: dict[str, tuple[int, ...]] = {}
    for step in steps:
        wanted |= zip(step.keys, step.shapes, strict=True)
    for key, shape in wanted.items():
        if key not in entries:
            raise InputError(
                f"--load {checkpoint}: {key} is missing, which the model of its config.yaml has: "
                "load another checkpoint"
            )
        if tuple(entries[key].size) != shape:
            raise InputError(
                f"--load {checkpoint}: {key} is {list(entries[key].size)}, and by its config.yaml "
                f"it is {list(shape)}: load another checkpoint"
            )
    for key in entries:
        if key not in wanted and not key.startswith(_OPTIMIZER) and not key.endswith(_BALANCING):
            raise InputError(
                f"--load {checkpoint}: it has {key}, which the model of its config.yaml lacks: "
                "load another checkpoint"
            )
    return entries


def write_safetensors(
    steps: Sequence[Step],
    checkpoint: Path,
    entries: Entries,
    folder: Path,
    dtype: torch.dtype | None,
    file_bytes: int,
    advance: Callable[[int], object] = lambda _: None,
) -> Written:
    """Write all results of the steps to `folder`, from fp32 masters where the checkpoint has them.

    In memory are the tensors of one file, and of one step what it reads and makes.

    Args:
        entries: what `checked_entries` returned.
        dtype: of the written tensors, except integers. None: that of the checkpoint's weights.
        file_bytes: the most bytes of tensors in a file; a larger tensor is alone in its file.
        advance: called with the number of bytes of each written file.

    Raises InputError if the folder cannot be written, and StorageError if the checkpoint cannot
    be read.
    """
    dtypes = dtypes_of(steps, entries, dtype)
    shapes = {name: shape for step in steps for name, shape in step.results}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    files = _divided(sizes, file_bytes)
    names = [ONE_FILE]
    if len(files) > 1:
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    results = tensors_of(steps, checkpoint, entries, dtype)
    for file, of_file in zip(names, files, strict=True):
        _save(dict(next(results) for _ in of_file), folder / file)
        advance(sum(sizes[name] for name in of_file))
    weights = (shape for name, shape in shapes.items() if dtypes[name].is_floating_point)
    parameters, size = sum(map(math.prod, weights)), sum(sizes.values())
    if len(files) > 1:
        where = {name: file for file, part in zip(names, files, strict=True) for name in part}
        index = {
            "metadata": {"total_parameters": parameters, "total_size": size},
            "weight_map": where,
        }
        (folder / WEIGHT_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    first = str(next(iter(dtypes.values()))).removeprefix("torch.")
    return Written(parameters, size, first, names)


def tensors_of(
    steps: Sequence[Step], checkpoint: Path, entries: Entries, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All results of the steps, in order, with their names. As in `write_safetensors`."""
    dtypes = dtypes_of(steps, entries, dtype)
    for step in steps:
        made = _made(step, checkpoint, entries)
        for (name, shape), tensor in zip(step.results, made, strict=True):
            assert tensor.shape == shape, (name, tensor.shape)
            yield name, tensor.to(dtypes[name]).contiguous()


def dtypes_of(
    steps: Sequence[Step], entries: Entries, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each result. As in `write_safetensors`."""
    return {name: _dtype_of(step, entries, dtype) for step in steps for name, _ in step.results}


def _dtype_of(step: Step, entries: Entries, dtype: torch.dtype | None) -> torch.dtype:
    if step.always_fp32:
        return torch.float32
    stored = entries[step.keys[-1]].properties.dtype
    return stored if dtype is None or not stored.is_floating_point else dtype


def _divided(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """The names in the same order, in files of at most `limit` bytes or one tensor."""
    files: list[list[str]] = []
    size = 0
    for name, more in sizes.items():
        if not files or size + more > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += more
    return files


def _made(step: Step, checkpoint: Path, entries: Entries) -> Tensors:
    keys = [MASTER + key if MASTER + key in entries else key for key in step.keys]
    read = {key: torch.empty(shape, dtype=entries[key].properties.dtype)
            for key, shape in zip(keys, step.shapes, strict=True)}  # fmt: skip
    read_whole(read, checkpoint)
    return step.make(*read.values())


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    library = import_optional("safetensors.torch", "an export")
    try:
        library.save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library lets only the owner read it
    except Exception as error:  # the library's own class, which is no OSError
        reason = str(error).rpartition("I/O error: ")[2]
        raise InputError(
            f"--output: {path.name} cannot be written ({reason}): name a folder on a disk with room"
        ) from None


@contextmanager
def new_folder(output: Path, needed: int = 0) -> Iterator[Path]:
    """A folder next to `output` that gets its name if the block succeeds, and else is removed.

    Raises InputError if `output` exists with content, if its disk lacks room for `needed` bytes, or
    if it cannot be written.
    """
    output = output.absolute()
    lock = output.with_name(f".{output.name}.lock")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"--output {output} already exists: name a new folder")
    try:
        with locked(lock):
            try:
                free = shutil.disk_usage(output.parent).free
                if needed > free:
                    raise InputError(
                        f"--output {output}: the weights take {needed / 2**20:,.1f} MiB, and "
                        f"{free / 2**20:,.1f} MiB of the disk are free: name a folder on another "
                        "disk"
                    )
                with atomic_folder(output) as building:
                    yield building
            finally:
                lock.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"--output {output} cannot be written ({error.strerror or one_line(error)}): "
            "name a folder on a disk with room"
        ) from error
