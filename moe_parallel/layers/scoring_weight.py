"""The weight with which experts score tokens (W_down): replicated, or gathered for each use.

Shape suffixes: E all experts, L experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from moe_parallel.experts.parameters import (
    ShardedStateDict,
    mark_expert_weight,
    shard_of_experts,
)
from moe_parallel.layers.expert_layer import ExpertLayer
from moe_parallel.parallel import gather_over
from moe_parallel.telemetry.progress import Phase

ShardedOffsets = tuple[tuple[int, int, int], ...]


class ScoringWeight(Protocol):
    """A parameter with one matrix per expert, which every token uses before it is dispatched."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends in a forward pass that uses both `whole` and `local`."""

    def whole(self) -> AbstractContextManager[torch.Tensor]:
        """The weight of all experts, [E, ...], for use inside the `with` block.

        If the block saves it for the backward pass, this class controls what is kept.
        """

    def local(self) -> AbstractContextManager[torch.Tensor]:
        """The weight of this rank's experts, [L, ...], for use inside the `with` block."""

    def sharded(self, prefix: str, sharded_offsets: ShardedOffsets) -> ShardedStateDict:
        """The entry in a sharded state dict; empty if the default entry is right."""


class ReplicatedWeight:
    """Every rank of a stage holds the weight of every expert, as it holds the router's weight."""

    wire_bytes = 0

    def __init__(self, layer: ExpertLayer, name: str, *shape: int) -> None:
        layer.add_replicated_weight(name, layer.num_experts, *shape)
        self._layer, self._name = layer, name

    def whole(self) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(self._layer.replicated(getattr(self._layer, self._name)))

    def local(self) -> AbstractContextManager[torch.Tensor]:
        whole = self._layer.replicated(getattr(self._layer, self._name))
        return nullcontext(self._layer.experts.local(whole))

    def sharded(self, prefix: str, sharded_offsets: ShardedOffsets) -> ShardedStateDict:
        return {}


class GatheredWeight:
    """Each rank holds the weight of its own experts, with axis 1 split over etp.

    A rank gathers the rest. This is an expert weight: its gradient is reduced over edp, and its
    optimizer state is divided in the same way as the weight. Gathering over etp gives the complete
    weight of this rank's experts, and gathering that over ep gives the weight of all experts. The
    result is not kept for the backward pass, which gathers again. If the layer is recomputed, it is
    kept, because the backward pass then repeats the forward pass and uses it at once.
    """

    SHARDED_AXIS = 1

    def __init__(self, layer: ExpertLayer, name: str, *shape: int) -> None:
        groups = layer.context.groups
        parts = groups.etp.size()
        assert shape[0] % parts == 0, (name, shape, parts)
        here = (layer.num_experts // groups.ep.size(), shape[0] // parts, *shape[1:])
        weight = nn.Parameter(torch.empty(here, dtype=layer.config.params_dtype))
        mark_expert_weight(weight, groups, self.SHARDED_AXIS)
        layer.register_parameter(name, weight)
        self._layer, self._name, self._groups = layer, name, groups
        full = layer.config.recompute_granularity == "full"
        self._keeps = full or layer.context.recomputes_layers

    @property
    def wire_bytes(self) -> int:
        """`local` and `whole` each send over etp; `whole` also sends over ep."""
        etp, ep = self._groups.etp.size(), self._groups.ep.size()
        part = self._weight.numel() * self._weight.element_size()
        return 2 * part * (etp - 1) + part * etp * (ep - 1)

    def whole(self) -> AbstractContextManager[torch.Tensor]:
        return self._saved_as_parts(self._gather_all)

    def local(self) -> AbstractContextManager[torch.Tensor]:
        return self._saved_as_parts(self._gather_local)

    def sharded(self, prefix: str, sharded_offsets: ShardedOffsets) -> ShardedStateDict:
        key = prefix + self._name
        shard = shard_of_experts(
            key, self._weight, self.SHARDED_AXIS, self._groups, sharded_offsets
        )
        return {key: shard}

    @property
    def _weight(self) -> torch.Tensor:
        return getattr(self._layer, self._name)

    def _gather_local(self) -> torch.Tensor:
        return self._gather(self._weight, self.SHARDED_AXIS, self._groups.etp)

    def _gather_all(self) -> torch.Tensor:
        return self._gather(self._gather_local(), 0, self._groups.ep)

    def _gather(self, part: torch.Tensor, axis: int, group: ProcessGroup) -> torch.Tensor:
        progress = self._layer.context.progress
        with progress.during(Phase.DISPATCH):
            gathered = gather_over(part, axis, group)
        if gathered is not part:
            progress.during_backward(Phase.DISPATCH, gathered)
        return gathered

    @contextmanager
    def _saved_as_parts(self, gather: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
        """The result of `gather`. If the block saves it or a view of it, only the view's shape,
        strides and offset are kept, and the backward pass gathers again.
        """
        gathered = gather()
        storage = gathered.untyped_storage()._cdata  # fake tensors, of plans, have no address
        if self._keeps or gathered is self._weight:
            yield gathered
            return

        def pack(saved: torch.Tensor) -> Any:
            if saved.untyped_storage()._cdata != storage:
                return saved
            return saved.shape, saved.stride(), saved.storage_offset()

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            with torch.no_grad():
                return gather().as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            yield gathered


def scoring_weight(layer: ExpertLayer, gathered: bool, name: str, *shape: int) -> ScoringWeight:
    """Register the parameter `name` [E, *shape] of a layer.

    Args:
        gathered: gather the weight over the ranks that hold the experts, if there are several;
            otherwise every rank holds it completely.
    """
    divided = layer.context.groups.etp_ep.size() > 1
    kind = GatheredWeight if gathered and divided else ReplicatedWeight
    return kind(layer, name, *shape)
