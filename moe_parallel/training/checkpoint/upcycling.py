"""A dense checkpoint, read as if it were one of a model of experts. See model/upcycling.py.

In every layout and with every optimizer, a rank's share of the experts' weights and of Adam's state
is a list of boxes in complete tensors. Each box specifies the part of the dense matrix from which
it starts. So every rank reads only those parts, whatever layout saved them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from moe_parallel.model.upcycling import FACTORS, STARTS, DenseLayer, ExpertPart, GateFactors
from moe_parallel.training.checkpoint.optimizer import (
    MASTER,
    MOMENTS,
    MOMENTUM,
    STATE_PREFIX,
    Box,
    enclosing,
)

# Groups: the optimizer's state, the layer, the name of the weight without its shape suffix.
_EXPERT_WEIGHT = re.compile(
    rf"({re.escape(STATE_PREFIX)}(?:{'|'.join((*MOMENTS, MOMENTUM))})\.|)"
    r"(.+\.mlp)\.(?:experts\.)?(w_[a-z_]+)_[A-Z0-9]+"
)
_SHARED_EXPERT_OUT = re.compile(r".+\.mlp\..+\.linear_fc2\.weight")


class DenseReader:
    """Finds the tensors of a model of experts in a dense checkpoint.

    reader = DenseReader(stored, seed)
    same = reader.same(wanted)              # read these unchanged,
    parts = reader.parts()                  # and these,
    reader.fill()                           # then set all others
    """

    def __init__(self, stored: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """`stored`: the shapes of the tensors in the checkpoint."""
        self._stored = stored
        self._seed = seed
        self._layers: dict[str, DenseLayer] = {}
        self._noted: dict[tuple[str, int], list[tuple[Box, Callable[[torch.Tensor], object]]]] = {}
        self._parts: dict[tuple[str, int], ShardedTensor] = {}

    def same(self, wanted: Iterable[ShardedTensor]) -> list[ShardedTensor]:
        """The tensors that the dense model has too; records how the other `wanted` ones start."""
        return [tensor for tensor in wanted if not self._starts_otherwise(tensor)]

    def parts(self) -> list[ShardedTensor]:
        """The parts of dense layers to read: one part, fp32 [rows, columns], per needed matrix."""
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
        """Set the recorded tensors, after the `parts` have been read."""
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
            tensor.data.zero_()  # adds nothing at first, and still gets gradients
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
