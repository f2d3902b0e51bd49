"""A dense checkpoint, read as if it were one of a model of experts. See model/upcycling.py.

Whatever layout and optimizer the experts have, a rank's share of their weights and of Adam's state
is a list of boxes in whole tensors. Each box says which part of which dense matrix it starts as, so
every rank reads those parts alone, whatever layout has saved them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from moe_parallel.model.upcycling import FACTORS, STARTS, DenseLayer, ExpertPart, GateFactors
from moe_parallel.training.checkpoint.optimizer import MASTER, MOMENTS, PREFIX, Box, enclosing

# Adam's state, the layer, the name of the weight without its shape suffix.
_EXPERT_WEIGHT = re.compile(
    rf"({re.escape(PREFIX)}(?:{'|'.join(MOMENTS)})\.|)(.+\.mlp)\.(?:experts\.)?(w_[a-z_]+)_[A-Z0-9]+"
)
_SHARED_EXPERT_OUT = re.compile(r".+\.mlp\..+\.linear_fc2\.weight")


class DenseReader:
    """Finds what a model of experts wants to load in a dense checkpoint.

    reader = DenseReader(stored, seed)
    same = reader.same(wanted)              # read these as they are,
    parts = reader.parts()                  # and these,
    reader.fill()                           # then give all others their values
    """

    def __init__(self, stored: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """`stored`: the shapes of the tensors in the checkpoint."""
        self._stored = stored
        self._seed = seed
        self._layers: dict[str, DenseLayer] = {}
        self._noted: dict[tuple[str, int], list[tuple[Box, Callable[[torch.Tensor], object]]]] = {}
        self._parts: dict[tuple[str, int], ShardedTensor] = {}

    def same(self, wanted: Iterable[ShardedTensor]) -> list[ShardedTensor]:
        """Those of `wanted` that the dense model has too; of the others, notes how they start."""
        return [tensor for tensor in wanted if not self._starts_otherwise(tensor)]

    def parts(self) -> list[ShardedTensor]:
        """What to read of dense layers: one part, fp32 [rows, columns], of each matrix needed."""
        for (key, half), noted in self._noted.items():
            box = enclosing(box for box, _ in noted)
            self._parts[key, half] = ShardedTensor(
                key=key,
                data=torch.empty(box.sizes),
                dtype=torch.float32,
                local_shape=box.sizes,
                global_shape=self._stored[key],
                global_offset=box.offsets,
                axis_fragmentations=None,
            )
        return list(self._parts.values())

    @torch.no_grad()
    def fill(self) -> None:
        """Give what was noted its values, once the `parts` have been read."""
        for place, noted in self._noted.items():
            part = self._parts[place]
            for box, fill in noted:
                fill(part.data[box.slices(part.global_offset)])

    @torch.no_grad()
    def _starts_otherwise(self, tensor: ShardedTensor) -> bool:
        if match := _EXPERT_WEIGHT.fullmatch(tensor.key):
            state, layer, name = match.groups()
            if name in STARTS:
                if not (state and name in FACTORS):
                    self._note(tensor, state, layer, name)
                return True
        if _SHARED_EXPERT_OUT.fullmatch(tensor.key):
            tensor.data.zero_()  # so that it adds nothing at first, and learns all the same
            return True
        return ".mlp." in tensor.key and tensor.key not in self._stored  # a router: stays random

    def _note(self, tensor: ShardedTensor, state: str, layer: str, name: str) -> None:
        assert not tensor.prepend_axis_num, tensor.key
        part = ExpertPart(tensor.data, tensor.global_offset, tensor.global_shape)
        dense = self._dense(layer)
        for start in STARTS[name](part, dense):
            key = f"{layer}.{start.matrix.weight}"
            precise = state or (MASTER if MASTER + key in self._stored else "")
            half = start.matrix.half
            box = Box(
                (half * dense.width + start.rows.start, start.columns.start),
                (len(start.rows), len(start.columns)),
            )
            self._noted.setdefault((precise + key, half), []).append((box, start.fill))

    def _dense(self, layer: str) -> DenseLayer:
        if layer not in self._layers:
            # [D, F], see model/upcycling.py.
            hidden_size, width = self._stored[f"{layer}.linear_fc2.weight"]
            gate = GateFactors(f"{self._seed} {layer}")
            self._layers[layer] = DenseLayer(hidden_size, width, gate)
        return self._layers[layer]
