"""Exports a checkpoint, saved in any layout, to a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_parallel.collective_errors import StorageError
from moe_parallel.config import Config
from moe_parallel.data.tokenizer import GENERATION_FILE, Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.huggingface.card import Facts, export_notes, model_card
from moe_parallel.huggingface.families import FAMILIES, Family, fields_of
from moe_parallel.huggingface.own_model import ARCHITECTURE, CODE, own_config_json, own_steps
from moe_parallel.huggingface.tensors import Step, low_rank_size, plain_steps
from moe_parallel.huggingface.tokenizer import write_tokenizer
from moe_parallel.huggingface.weights import (
    Written,
    checked_entries,
    new_folder,
    tensors_of,
    write_safetensors,
)
from moe_parallel.optional import import_optional
from moe_parallel.platform.device import device
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, read_metrics
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.index import Entries
from moe_parallel.training.checkpoint.record import check_content, read_record
from moe_parallel.training.standalone import standalone_config, vocab_size_of
from moe_parallel.training.text import open_tokenizer

AUTO, OWN = "auto", "own"
DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is exported."""

    architecture: str = AUTO  # the first that is equal; `own`; or a class of transformers
    dtype: str = "auto"  # one of DTYPES; auto: that of the checkpoint
    fold: bool = False  # multiply W_g = W_down W_up out
    file_bytes: int = 4 * 2**30  # the most in a file of weights


@dataclass(frozen=True)
class ExportSource:
    """A checkpoint, and what is known of it."""

    checkpoint: Path
    config: Config  # on one process
    vocab_size: int  # without padding
    tokenizer: Tokenizer


def source_of(load: str, flags: Sequence[str] = ()) -> ExportSource:
    """The checkpoint of --load, with its configuration as `flags` of training change it.

    Raises InputError.
    """
    checkpoint = find_checkpoint(Path(load))
    config = standalone_config(flags, load=str(checkpoint))
    return ExportSource(checkpoint, config, vocab_size_of(config), open_tokenizer(config))


@dataclass(frozen=True)
class Exported:
    """What was written, and what the user should know of it."""

    architecture: str
    written: Written
    notes: list[str]


def export(
    source: ExportSource,
    output: Path,
    options: ExportOptions,
    advance: Callable[[int], object] = lambda _: None,
) -> Exported:
    """Write a checkpoint to the new folder `output`, completely or not at all.

    `advance`: called with the number of bytes of weights that have been written.

    Raises InputError for a system or an option without an exported form, a checkpoint that is
    damaged or not of its config.yaml, and a folder that exists or cannot be written.
    """
    config, size = source.config, source.vocab_size
    family = _family(config, options)
    architecture = ARCHITECTURE if family is None else family.architecture
    if family is None:
        fields = own_config_json(config, size, fold=options.fold)
        fields["pad_token_id"] = source.tokenizer.eod
        steps = own_steps(config, size, fold=options.fold)
    else:
        fields = fields_of(family, config, size)
        steps = plain_steps(family.places(config, size))
    with readable(source.checkpoint):
        record, entries = checked(source.checkpoint, steps)
        with new_folder(output) as folder:
            tokenizer = write_tokenizer(source.tokenizer, source.config.positions, folder)
            written = write_safetensors(
                steps, source.checkpoint, entries, folder, DTYPES[options.dtype],
                options.file_bytes, advance,
            )  # fmt: skip
            fields |= tokenizer.ids | {"dtype": written.dtype}
            _write_json(folder / "config.json", fields)
            _write_json(folder / GENERATION_FILE, tokenizer.generation)
            if family is None:
                # copyfile would name these files, and not the new ones, if the disk is full.
                for name, code in CODE.items():
                    (folder / name).write_bytes(code.read_bytes())
            facts = Facts(
                name=output.resolve().name,
                architecture=architecture,
                parameters=written.parameters,
                dtype=written.dtype,
                training=record["training"],
                validation=_validation(source.checkpoint, record["training"]["iteration"]),
                folded=options.fold,
                has_tokenizer=tokenizer.opens,
                adds_special_tokens=tokenizer.adds_special_tokens,
            )
            (folder / "README.md").write_text(model_card(source.config, facts), encoding="utf-8")
    return Exported(architecture, written, export_notes(source.config))


def model_in_memory(source: ExportSource, dtype: str = "float32") -> Any:
    """The model of an export, a MoeParallelForCausalLM in evaluation mode, on this process' device.

    `dtype`: of the weights, one of DTYPES. Raises InputError as `export` does, and if transformers
    is missing.
    """
    transformers = import_optional("transformers", f"--load {source.checkpoint}")
    from moe_parallel import hf

    transformers.logging.disable_progress_bar()  # of reading weights, which are in memory
    transformers.logging.set_verbosity_error()

    config, size = source.config, source.vocab_size
    fields = own_config_json(config, size, fold=False) | {"pad_token_id": source.tokenizer.eod}
    steps = own_steps(config, size, fold=False)
    with readable(source.checkpoint):
        _, entries = checked(source.checkpoint, steps)
        weights = dict(tensors_of(steps, source.checkpoint, entries, DTYPES[dtype]))
    model, found = hf.MoeParallelForCausalLM.from_pretrained(
        None,
        config=hf.MoeParallelConfig(**fields),
        state_dict=weights,
        dtype=DTYPES[dtype] or "auto",
        output_loading_info=True,
    )
    assert not any(found.values()), found
    return model.to(device())


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Raises InputError, with the name of the checkpoint, where one cannot be read."""
    try:
        yield
    except StorageError as error:
        raise InputError(f"--load {checkpoint}: {error}") from error


def checked(checkpoint: Path, steps: Sequence[Step]) -> tuple[dict[str, Any], Entries]:
    """The checkpoint's record, and the entries of its tensors, whose files are not damaged."""
    record = read_record(checkpoint)
    check_content(checkpoint, record["files"], slice(None))
    return record, checked_entries(steps, checkpoint)


def _family(config: Config, options: ExportOptions) -> Family | None:
    """The plain architecture to write. None: our own."""
    if options.fold and low_rank_size(config.selection) is None:
        raise InputError("--fold: W_g of the run's experts is one matrix already, so leave it out")
    if options.fold or options.architecture == OWN:
        if options.architecture not in (AUTO, OWN):
            raise InputError(
                f"--architecture is {options.architecture}, but --fold is for {OWN} alone: leave "
                "one of them out"
            )
        return None
    for family in FAMILIES:
        lack = family.lacks(config)
        if options.architecture == family.architecture and lack is not None:
            raise InputError(
                f"--architecture is {family.architecture}, which has no {lack}: use {AUTO}"
            )
        if lack is None and options.architecture in (AUTO, family.architecture):
            return family
    known = [AUTO, OWN, *(family.architecture for family in FAMILIES)]
    if options.architecture != AUTO:
        raise InputError(f"--architecture is {options.architecture}: use one of {', '.join(known)}")
    return None


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _validation(checkpoint: Path, iteration: int) -> MetricsLine | None:
    """The run's evaluation of this iteration, by domain. None: there is none."""
    path = checkpoint.parent / METRICS_FILE
    if not path.is_file():
        return None
    found: MetricsLine | None = None
    for record in read_metrics(path):
        if record.get("iteration") == iteration and "validation" in record:
            found = record["validation"]
    return found
