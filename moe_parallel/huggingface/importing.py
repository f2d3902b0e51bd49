"""Writes a run folder from a folder of transformers, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol

import torch

from moe_parallel.config import Config, make_config, read_command_line, read_yaml, validate
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.huggingface.families import family_of_folder, options_of, read_fields
from moe_parallel.huggingface.tensors import TensorPlace
from moe_parallel.huggingface.tokenizer import tokenizer_of_folder
from moe_parallel.huggingface.weights import TensorFolder, new_folder
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.checkpoint.tensors import StoredPart, write_weights
from moe_parallel.training.run_folder import fingerprint, stored_files, write_run_files
from moe_parallel.training.standalone import on_one_process


@dataclass(frozen=True)
class CheckedImport:
    """An import whose configuration and tokenizer have been checked."""

    folder: Path
    architecture: str
    places: Callable[[], Iterator[TensorPlace]]  # of all tensors of the model
    config: Config
    vocab_size: int
    tokenizer: Tokenizer


class StoredModel(Protocol):
    """The tensors of another library's model."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the model."""

    def check(self, places: Iterator[TensorPlace]) -> None:
        """Raises InputError for the first tensor that is missing or not as the model needs it."""

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU. Raises InputError."""


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    checkpoint: Path
    tensors: int  # the number of tensors read
    parameters: int
    dtypes: tuple[str, ...]
    not_finite: tuple[str, ...]  # the names of tensors with a NaN or an infinity


def plan_import(
    folder: Path, flags: Sequence[str], *, trust_remote_code: bool = False
) -> CheckedImport:
    """Check everything but the tensors.

    Args:
        folder: a folder that save_pretrained wrote.
        flags: of the training program. They change the configuration, but not the model.
        trust_remote_code: accept a folder with code of its own, which is not run.

    Raises InputError.
    """
    fields = read_fields(folder / "config.json")
    family = family_of_folder(fields)
    if "auto_map" in fields.values and not trust_remote_code:
        raise InputError(
            f"{fields.file}: the folder has code of its own (auto_map), which is not run here: if "
            f"its model is a plain {family.architecture}, add --trust-remote-code"
        )
    options = options_of(family, fields)
    vocab_size: int = fields.integer("vocab_size")
    config = config_of(options, flags, fields.file, vocab_size)
    return CheckedImport(
        folder,
        family.architecture,
        lambda: family.places(config, vocab_size),
        config,
        vocab_size,
        tokenizer_of_folder(folder, fields, config.data),
    )


def config_of(
    options: dict[str, Any], flags: Sequence[str], source: Path | None, vocab_size: int
) -> Config:
    """The configuration of an imported model, as flags of training change it.

    `source`: the file of all options of the model, which the flags may not change. None: the flags,
    or the file of --config, give those that `options` lacks.

    Raises InputError.
    """
    line = read_command_line(flags)
    for name in ("load", "save"):
        if name in line.given:
            raise InputError(f"--{name} is for training: --input and --output name the folders")
    if source is None:
        more = {} if line.file is None else read_yaml(line.file)
        config, _ = line.over(options | more, f"--config {line.file}")
    elif line.file is not None:
        raise InputError(f"--config names a file, but {source.name} has the model: leave it out")
    else:
        config, _ = line.over(options, str(source))
        _check_unchanged(source, make_config(options), config, vocab_size)
    if config.data.vocab_size != vocab_size:
        raise InputError(
            f"--vocab-size is {config.data.vocab_size}, but {vocab_size} in "
            f"{source or 'the embedding'}: leave it out"
        )
    config = replace(config, checkpoint=replace(config.checkpoint, load=None, save=None))
    validate(on_one_process(config), world_size=1)
    return config


def import_folder(
    plan: CheckedImport, output: Path, advance: Callable[[int], object] = lambda _: None
) -> Imported:
    """Write the run folder `output`, as `import_tensors` does. Raises InputError."""
    with TensorFolder(plan.folder) as tensors:
        return import_tensors(plan, tensors, output, advance)


def import_tensors(
    plan: CheckedImport,
    tensors: StoredModel,
    output: Path,
    advance: Callable[[int], object] = lambda _: None,
) -> Imported:
    """Write the run folder `output`, which appears under this name when it is complete.

    `advance` is called with the size in bytes of each tensor that was read. Raises InputError.
    """
    tensors.check(plan.places())
    dtypes = _dtypes(plan, tensors)
    not_finite: set[str] = set()

    def read(name: str) -> torch.Tensor:
        tensor = tensors.read(name)
        if not tensor.isfinite().all():
            not_finite.add(name)
        advance(tensor.nbytes)
        return tensor

    with new_folder(output, tensors.nbytes) as building:
        write_run_files(building, plan.config, plan.tokenizer)
        checkpoint = write_weights(
            CheckpointFolder(building),
            _parts(plan, dtypes, read),
            fingerprint(plan.config, plan.vocab_size, plan.tokenizer),
            stored_files(building, plan.config),
        )
    sizes = [math.prod(shape) for place in plan.places() for shape in place.shapes]
    names = tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))
    checkpoint = output / checkpoint.name
    return Imported(checkpoint, len(sizes), sum(sizes), names, tuple(sorted(not_finite)))


def _check_unchanged(source: Path, own: Config, config: Config, vocab_size: int) -> None:
    """Check that the flags change only the training, not the model."""
    old, new = (fingerprint(each, vocab_size, None) for each in (own, config))
    for flag in dict.fromkeys([*new, *old]):
        if old.get(flag) != new.get(flag):
            raise InputError(
                f"{flag} is {new.get(flag)}, but {old.get(flag)} in {source}: leave it out; "
                "tools/convert.py changes the system of a model"
            )


def _dtypes(plan: CheckedImport, tensors: StoredModel) -> dict[str, torch.dtype]:
    """The dtype of each of our tensors: that of theirs, or the wider one; fp32 without theirs."""
    found: dict[str, torch.dtype] = {}
    for place in plan.places():
        theirs = [tensors.dtype(name) for name in place.names] or [torch.float32]
        found[place.key] = reduce(torch.promote_types, theirs, found.get(place.key, theirs[0]))
    return found


def _parts(
    plan: CheckedImport, dtypes: dict[str, torch.dtype], read: Callable[[str], torch.Tensor]
) -> Iterator[StoredPart]:
    """Our tensors, each made of theirs when it is written."""

    def joined(place: TensorPlace) -> torch.Tensor:
        return place.form.join([read(name) for name in place.names])

    for place in plan.places():
        yield StoredPart(
            place.key,
            place.shape,
            place.offset,
            place.sizes,
            dtypes[place.key],
            partial(joined, place),
        )


def import_summary(plan: CheckedImport, imported: Imported) -> dict[str, Any]:
    """What was imported, for the user, by name."""
    return {
        "family": plan.architecture,
        "parameters": f"{imported.parameters:,} in {imported.tensors:,} tensors of "
        + ", ".join(imported.dtypes),
        "vocabulary": f"{plan.vocab_size:,}, of which the tokenizer has "
        f"{plan.tokenizer.vocab_size:,}",
        "checkpoint": imported.checkpoint,
    }
