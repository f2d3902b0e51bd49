"""Writes a run folder from a checkpoint of Megatron-LM, one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from moe_parallel.collective_errors import StorageError, one_line
from moe_parallel.errors import InputError
from moe_parallel.huggingface.families import Fields
from moe_parallel.huggingface.importing import (
    CheckedImport,
    Imported,
    config_of,
    import_tensors,
)
from moe_parallel.huggingface.tokenizer import tokenizer_of_folder
from moe_parallel.megatron_checkpoint.arguments import lack_of, options_of, read_arguments
from moe_parallel.megatron_checkpoint.tensors import (
    EMBEDDING,
    StoredTensors,
    check_files,
    has_our_layers,
    our_places,
    places,
)
from moe_parallel.reading import read_word
from moe_parallel.training.checkpoint.folder import RECORD, TRACKER, checkpoint_name
from moe_parallel.training.checkpoint.index import TENSOR_INDEX, read_index, tensor_entries

RELEASE = "release"  # the name of a checkpoint of weights alone, in place of an iteration
_ONLY = "import a dense or top-k GPT"
_ITERATION = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class CheckedCheckpoint(CheckedImport):
    """The same, and its tensors, which have not been checked."""

    tensors: StoredTensors


def plan_import(folder: Path, flags: Sequence[str]) -> CheckedCheckpoint:
    """Check everything but the tensors.

    Args:
        folder: of Megatron-LM's --save, or one of its checkpoints.
        flags: of the training program. They change the configuration, but not the model, unless the
            checkpoint has no arguments: then they give its sizes.

    Raises InputError.
    """
    checkpoint = _checkpoint(folder)
    index = _index(checkpoint)
    check_files(checkpoint, index)
    entries = tensor_entries(index)
    if EMBEDDING not in entries or len(entries[EMBEDDING].size) != 2:
        raise InputError(f"--input {checkpoint}: it has no {EMBEDDING}: {_ONLY}")
    rows = entries[EMBEDDING].size[0]
    # No padding, which would add numbers to the softmax: any power of 2 up to 128 that divides.
    vocabulary = {"vocab_size": rows, "make_vocab_size_divisible_by": math.gcd(rows, 128)}
    arguments, is_ours = read_arguments(checkpoint, index), has_our_layers(entries)
    if arguments is None:
        config = config_of(vocabulary, flags, None, rows)
        remedy = "it has no arguments, so give the model's own flags, or --config"
    else:
        options = options_of(arguments, has_our_layers=is_ours)
        config = config_of(options | vocabulary, flags, arguments.file, rows)
        remedy = "copy the folder again" if is_ours else _ONLY
    lack = None if is_ours else lack_of(config)
    if lack is not None:
        raise InputError(f"--input {checkpoint}: Megatron-LM has no {lack}: leave it out")
    tokenizer = tokenizer_of_folder(checkpoint, Fields(checkpoint, vocabulary), config.data)
    all_places = list(our_places(config, rows) if is_ours else places(config, rows))
    layers = ", layers of moe_parallel.megatron" if is_ours else ""
    return CheckedCheckpoint(
        checkpoint,
        f"GPTModel of Megatron-Core{layers}",
        lambda: iter(all_places),
        config,
        rows,
        tokenizer,
        StoredTensors(checkpoint, index, config, remedy),
    )


def import_checkpoint(
    plan: CheckedCheckpoint, output: Path, advance: Callable[[int], object] = lambda _: None
) -> Imported:
    """Write the run folder `output`, as `import_tensors` does. Raises InputError."""
    return import_tensors(plan, plan.tensors, output, advance)


def controlled(plan: CheckedCheckpoint) -> dict[str, float]:
    """The number that a controller of our layers had set for the next step, by its name in
    metrics.jsonl. {}: there is no controller. Raises InputError."""
    name = plan.config.selection.controlled
    keys = [place.key for place in plan.places() if place.key.endswith("controller.state")]
    return {name: float(plan.tensors.read(keys[0])[0])} if name and keys else {}


def _checkpoint(folder: Path) -> Path:
    """The folder itself, or the latest checkpoint in it."""
    if not folder.is_dir():
        raise InputError(f"--input {folder}: there is no such folder; check the path")
    checkpoint = folder
    if not (folder / TENSOR_INDEX).exists() and (folder / TRACKER).exists():
        latest = read_word(folder / TRACKER)
        if latest != RELEASE and not _ITERATION.fullmatch(latest):
            raise InputError(
                f"--input {folder}: {TRACKER} says {latest[:40]!r} instead of an iteration or "
                f"{RELEASE}; name one of its checkpoints"
            )
        checkpoint = folder / (latest if latest == RELEASE else checkpoint_name(int(latest)))
    if (checkpoint / RECORD).exists():
        raise InputError(
            f"--input {checkpoint}: it is a checkpoint of this program: --load reads it"
        )
    if not (checkpoint / TENSOR_INDEX).exists():
        raise InputError(
            f"--input {checkpoint}: it has no {TENSOR_INDEX}: name a checkpoint that Megatron-LM "
            "saved with --ckpt-format torch_dist"
        )
    return checkpoint


def _index(checkpoint: Path) -> Metadata:
    try:
        return read_index(checkpoint)
    except StorageError as error:
        raise InputError(f"--input {checkpoint}: {error}") from None
    except OSError as error:
        raise InputError(f"--input {checkpoint}: {one_line(error)}") from None
