"""Writes the tensors of an exported model in files of safetensors, a few in memory at a time.

model.safetensors                                   if one file holds all, otherwise
model.safetensors.index.json, model-0000N-of-0000M.safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_parallel.errors import InputError
from moe_parallel.huggingface.folder import ONE_FILE, WEIGHT_INDEX
from moe_parallel.huggingface.steps import Step, Tensors
from moe_parallel.optional import import_optional
from moe_parallel.training.checkpoint.index import Entries, read_index, tensor_entries
from moe_parallel.training.checkpoint.optimizer import MASTER
from moe_parallel.training.checkpoint.tensors import read_whole

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
    dtypes = _dtypes(steps, entries, dtype)
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
    dtypes = _dtypes(steps, entries, dtype)
    for step in steps:
        made = _made(step, checkpoint, entries)
        for (name, shape), tensor in zip(step.results, made, strict=True):
            assert tensor.shape == shape, (name, tensor.shape)
            yield name, tensor.to(dtypes[name]).contiguous()


def _dtypes(
    steps: Sequence[Step], entries: Entries, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
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
