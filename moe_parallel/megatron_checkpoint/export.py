"""Writes a checkpoint, saved in any layout, as one that Megatron-LM loads, a few tensors at a time.

OUTPUT/latest_checkpointed_iteration.txt    "release": there are weights alone
OUTPUT/release/                             .metadata metadata.json common.pt *.distcp
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.huggingface.export import checked, readable
from moe_parallel.huggingface.tensors import TensorShape, plain_steps
from moe_parallel.huggingface.weights import dtypes_of, new_folder, tensors_of
from moe_parallel.megatron_checkpoint.arguments import arguments_of, lack_of
from moe_parallel.megatron_checkpoint.importing import RELEASE
from moe_parallel.megatron_checkpoint.tensors import EMBEDDING, EXPERTS, OWN_NORMS, places, stacked
from moe_parallel.training.checkpoint.folder import (
    RECORD,
    TRACKER,
    CheckpointFolder,
    find_checkpoint,
)
from moe_parallel.training.checkpoint.index import COMMON
from moe_parallel.training.checkpoint.tensors import StoredPart, write_alone
from moe_parallel.training.standalone import standalone_config, vocab_size_of

#: Megatron-LM's names for its specs of layers.
IMPLEMENTATIONS = ("transformer_engine", "local")
#: Modules with a state of their own in one of the specs. Without FP8 it is empty.
_WITH_STATE = re.compile(r"(.+\.(?:linear_\w+|\w+_layernorm)\.)weight")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    checkpoint: Path
    parameters: int
    dtype: str  # of the embedding, as torch names it


def export(
    load: str,
    output: Path,
    transformer_impl: str = IMPLEMENTATIONS[0],
    advance: Callable[[int], object] = lambda _: None,
) -> Exported:
    """Write the checkpoint of --load to the new folder `output`, completely or not at all.

    `advance`: called with the bytes of each tensor.

    Raises InputError for a model that Megatron-LM does not have, a checkpoint that is damaged or
    not of its config.yaml, and a folder that exists or cannot be written.
    """
    checkpoint = find_checkpoint(Path(load))
    config = standalone_config([], load=str(checkpoint))
    lack = lack_of(config)
    if lack is not None:
        raise InputError(f"--load {load}: Megatron-LM has no {lack}: tools/export_hf.py exports it")
    rows = config.padded_vocab_size(vocab_size_of(config))
    steps = plain_steps(places(config, rows))
    shapes = {name: shape for step in steps for name, shape in step.results}
    with readable(checkpoint):
        _, entries = checked(checkpoint, steps)
        dtypes = dtypes_of(steps, entries, None)
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        nbytes = sum(size * dtypes[name].itemsize for name, size in sizes.items())
        with new_folder(output, nbytes) as building:
            parts = _Parts(tensors_of(steps, checkpoint, entries, None), advance)
            for name, shape in shapes.items():
                parts.add(name, shape, dtypes[name], _slots(config, name, transformer_impl))
            written = write_alone(
                CheckpointFolder(building), {"training": {"iteration": 0}}, {}, parts.parts,
                parts.states,
            )  # fmt: skip
            common = {
                "args": arguments_of(config, rows, dtypes[EMBEDDING], transformer_impl),
                "checkpoint_version": 3.0,
                "iteration": 0,
                "num_floating_point_operations_so_far": 0,
                "content_metadata": {"singleton_local_shards": False},
            }
            (written / COMMON).write_bytes(_saved(common))
            (written / RECORD).unlink()  # it is no checkpoint of ours
            written.rename(building / RELEASE)
            (building / TRACKER).write_text(f"{RELEASE}\n")
    dtype = str(dtypes[EMBEDDING]).removeprefix("torch.")
    return Exported(output / RELEASE, sum(sizes.values()), dtype)


def _saved(value: Any) -> bytes:
    content = io.BytesIO()  # on a full disk, torch.save would raise what is no OSError
    torch.save(value, content)
    return content.getvalue()


@dataclass(frozen=True)
class _Slot:
    """Where a tensor is in one of several layers and experts."""

    key: str
    axes: TensorShape  # the numbers of layers and of experts, as far as that tensor has them
    offset: TensorShape  # in these axes

    @property
    def state(self) -> str | None:
        """The key of the state of its module; None: it has none."""
        match = _WITH_STATE.fullmatch(self.key)
        place, of = (".".join(map(str, each)) for each in (self.offset or (0,), self.axes or (1,)))
        return f"{match[1]}_extra_state/shard_{place}_{of}" if match else None


def _slots(config: Config, name: str, transformer_impl: str) -> list[_Slot]:
    """Where Megatron-Core stores a tensor: in one of all layers if they are alike, and an expert's
    in one of all experts."""
    key, layer = stacked(name)
    if layer is None:
        return [_Slot(key, (), ())]
    if len(set(config.moe_layers)) > 1:
        slot = _Slot(name, (), ())
    else:
        slot = _Slot(key, (config.model.num_layers,), (layer,))
    if config.moe_layers[layer] and transformer_impl == "transformer_engine":
        slot = replace(slot, key=slot.key.replace(*OWN_NORMS[1]))
    if EXPERTS not in name:
        return [slot]
    n = config.num_experts
    return [_Slot(slot.key, (*slot.axes, n), (*slot.offset, e)) for e in range(n)]


class _Parts:
    """What is written: parts of tensors, and the states of modules.

    The tensors are made one after the other, and each has parts of one size.
    """

    def __init__(
        self, tensors: Iterator[tuple[str, torch.Tensor]], advance: Callable[[int], object]
    ) -> None:
        self.parts: list[StoredPart] = []
        self.states: dict[str, bytes] = {}
        self._tensors, self._advance = tensors, advance
        self._name, self._tensor = "", torch.empty(0)
        self._nothing = _saved([None])  # a list, as Megatron-Core stores it

    def add(self, name: str, shape: TensorShape, dtype: torch.dtype, slots: list[_Slot]) -> None:
        """Add the next tensor, one part for each slot."""
        inner = shape[1:] if EXPERTS in name else shape
        for number, slot in enumerate(slots):
            sizes = (1,) * len(slot.axes) + inner
            read = partial(self._read, name, number, sizes)
            offset = slot.offset + (0,) * len(inner)
            self.parts.append(StoredPart(slot.key, slot.axes + inner, offset, sizes, dtype, read))
            if slot.state is not None:
                self.states[slot.state] = self._nothing

    def _read(self, name: str, number: int, sizes: TensorShape) -> torch.Tensor:
        if name != self._name:
            self._name, self._tensor = next(self._tensors)
            self._advance(self._tensor.nbytes)
        assert name == self._name, (name, self._name)
        return self._tensor.view(-1, *sizes)[number]
