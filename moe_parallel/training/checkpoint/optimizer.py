"""The optimizer's state as tensors shaped like the model's, for every optimizer and layout.

Megatron-Core's optimizers each write their own format: by position in the parameter groups, by
chained optimizer, by flat buffer. Some of these load under another layout, none under all of them.
Here the state of a parameter with the key K is always

    optimizer.state.exp_avg.K    optimizer.state.exp_avg_sq.K    fp32, of the global shape of K
    optimizer.state.momentum_buffer.K            instead of these, if Muon updates the parameter
    optimizer.state.fp32_param.K                 only if the parameter itself is not fp32

and every rank reads and writes its own part. The distributed optimizer keeps a range of the
flattened parameter. Such a range is a few boxes (`boxes`), each a view of the flat state, so
nothing is gathered or copied, and a load fills the state in place.

Learning rate and weight decay follow from the scheduler. Adam's step is the only other number.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from moe_parallel.training.optimizer import optimizer_parts

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
MOMENTUM = "momentum_buffer"  # Muon's
STATE_PREFIX = "optimizer.state."
MASTER = f"{STATE_PREFIX}fp32_param."


Placement: TypeAlias = ShardedTensor | ShardedTensorFactory


@dataclass(frozen=True)
class Piece:
    """This rank's part of the optimizer state of one parameter."""

    parameter: torch.nn.Parameter
    placement: Placement  # the parameter's place in the model's global tensors
    main: torch.Tensor  # fp32, which is updated: the parameter, a copy of it, or a range of it
    start: int  # index in the flattened parameter at which `main` starts
    split: bool  # whether data-parallel ranks keep different ranges, or all the same
    optimizer: torch.optim.Optimizer  # contains the state of `main`

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the tensors in that state."""
        return (MOMENTUM,) if "momentum" in self.optimizer.defaults else MOMENTS

    @property
    def has_master(self) -> bool:
        """Whether `main` is more precise than the parameter, so that it must be saved."""
        return self.parameter.dtype != self.main.dtype


def pieces(optimizer: MegatronOptimizer, model: dict[str, Any]) -> list[Piece]:
    """The pieces of every parameter that this rank updates, in a fixed order.

    `model` is the sharded state dict of all model chunks, not yet saved or loaded.
    """
    tensors, _ = extract_sharded_tensors_and_factories(model)
    placements = {id(tensor.data): tensor for tensor in nested_values(tensors)}
    return [
        Piece(parameter, placements[id(parameter)], main, start, split, part.optimizer)
        for part in optimizer_parts(optimizer)
        if not part.is_stub_optimizer
        for parameter, main, start, split in _updated(part)
    ]


def _updated(
    optimizer: MegatronOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, bool]]:
    """Parameter, main, start and split of every piece; see `Piece`."""
    groups: list[tuple[Any, Any]]  # of parameters, and of what is updated for them
    split = isinstance(optimizer, DistributedOptimizer)
    if isinstance(optimizer, DistributedOptimizer):
        groups = [
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = [
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
        ]
    elif isinstance(optimizer, FP32Optimizer):
        parameters = optimizer.get_parameters()
        groups = [([parameters], [parameters])]
    else:
        raise TypeError(f"no checkpoint format for a {type(optimizer).__name__}")
    for models, mains in groups:
        for parameter, main in zip(chain(*models), chain(*mains), strict=True):
            start = optimizer._get_model_param_range_map(parameter)["param"].start if split else 0
            yield parameter, main, start, split


def moment_tensors(held: list[Piece]) -> list[ShardedTensor]:
    """The moments, placed; those that do not exist yet are created as zeros, as optimizers do."""
    return [
        tensor
        for piece in held
        for name in piece.moments
        for tensor in _place(piece, _moment(piece, name), f"{STATE_PREFIX}{name}.")
    ]


def master_tensors(held: list[Piece]) -> list[ShardedTensor]:
    """The fp32 copies of parameters that are not fp32, placed."""
    return [
        tensor for piece in held if piece.has_master for tensor in _place(piece, piece.main, MASTER)
    ]


def masters_to_read(held: list[Piece], stored: Collection[str]) -> list[ShardedTensor]:
    """The `master_tensors`, read from the parameters themselves if those were saved in fp32."""
    return [
        tensor if tensor.key in stored else replace(tensor, key=tensor.key.removeprefix(MASTER))
        for tensor in master_tensors(held)
    ]


def most_precise(weights: Iterable[ShardedTensor], stored: Collection[str]) -> list[ShardedTensor]:
    """The weights of a model, with fp32 ones read from the fp32 copies of a bf16 run."""
    return [
        replace(weight, key=MASTER + weight.key)
        if weight.data.dtype == torch.float32 and MASTER + weight.key in stored
        else weight
        for weight in weights
    ]


def adam_step(held: list[Piece]) -> int:
    """The number of steps that Adam has taken; 0 if it updates nothing on this rank."""
    for piece in _adams(held):
        group_step = next(iter(piece.optimizer.param_groups)).get("step", 0)
        return int(piece.optimizer.state[piece.main].get("step", group_step))
    return 0


def set_adam_step(held: list[Piece], step: int) -> None:
    """Set the step: torch's Adam counts it per parameter, Apex's and TE's fused ones per group."""
    for piece in _adams(held):
        if isinstance(piece.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            piece.optimizer.state[piece.main]["step"] = torch.tensor(float(step))
        else:
            for group in piece.optimizer.param_groups:
                group["step"] = step


def _adams(held: list[Piece]) -> Iterator[Piece]:
    return (piece for piece in held if piece.moments is MOMENTS)


def _moment(piece: Piece, name: str) -> torch.Tensor:
    state = piece.optimizer.state[piece.main]
    if name not in state:
        state[name] = torch.zeros_like(piece.main)
        if isinstance(piece.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            state.setdefault("step", torch.tensor(0.0))
    return state[name]


def _place(piece: Piece, state: torch.Tensor, prefix: str) -> Iterator[ShardedTensor]:
    """The boxes that `state`, shaped like `piece.main`, fills in global tensors.

    A box is split where the module's factory splits the parameter (a gated pair in one matrix).
    """
    shape = tuple(piece.parameter.shape)
    parts = _parts(piece.placement, shape)
    flat = state.detach().view(-1)
    used = 0
    for box in boxes(shape, piece.start, piece.start + flat.numel()):
        values = flat[used : used + math.prod(box.sizes)].view(box.sizes)
        used += values.numel()
        for part, part_box in parts:
            if common := box.intersection(part_box):
                yield _placed(
                    part,
                    prefix,
                    values[common.slices(box.offsets)],
                    tuple(c - p for c, p in zip(common.offsets, part_box.offsets, strict=True)),
                    piece.split,
                )


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: its first index and its size along each axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def intersection(self, other: "Box") -> "Box | None":
        """The box that both contain, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops(), other.stops()))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Index this box in a tensor whose first element is `origin`."""
        return tuple(
            slice(offset - first, offset - first + size)
            for offset, size, first in zip(self.offsets, self.sizes, origin, strict=True)
        )

    def stops(self) -> tuple[int, ...]:
        """The index after the last element along each axis."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))


def enclosing(boxes: Iterable[Box]) -> Box:
    """The smallest box that contains all of these, at least one, of equally many axes."""
    several = list(boxes)
    starts = tuple(map(min, zip(*(box.offsets for box in several), strict=True)))
    stops = tuple(map(max, zip(*(box.stops() for box in several), strict=True)))
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut elements `start:stop` of a row-major tensor of `shape` into boxes, in order.

    Each box is contiguous in the flattened tensor. At most 2 * len(shape) - 1 are needed.
    """
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, within = divmod(start, inner)
        rows = 0 if within else (stop - start) // inner
        if rows:
            yield Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            start += rows * inner
        else:
            end = min(stop, (row + 1) * inner)
            for box in boxes(shape[1:], within, end - row * inner):
                yield Box((row, *box.offsets), (1, *box.sizes))
            start = end


def _parts(placement: Placement, shape: tuple[int, ...]) -> list[tuple[ShardedTensor, Box]]:
    """The sharded tensors that store a parameter, each with its box in the parameter."""
    if isinstance(placement, ShardedTensor):
        return [(placement, Box((0,) * len(shape), shape))]
    whole = torch.empty(shape, device="meta")
    built = placement.build_fn(placement.key, whole, placement.replica_id, None)
    return [(part, _box_of_view(part.data, whole)) for part in nested_values(built)]


def _box_of_view(view: torch.Tensor, whole: torch.Tensor) -> Box:
    same_memory = view.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert same_memory and view.stride() == whole.stride(), (
        "a ShardedTensorFactory of a trained parameter may slice it, but not move its elements"
    )
    offsets = []
    rest = int(view.storage_offset())
    for stride in whole.stride():
        offset, rest = divmod(rest, stride)
        offsets.append(offset)
    return Box(tuple(offsets), tuple(view.shape))


def _placed(
    part: ShardedTensor,
    prefix: str,
    values: torch.Tensor,
    offsets: tuple[int, ...],
    split: bool,
) -> ShardedTensor:
    """`values` as the box at `offsets` within `part`, without assuming a regular grid."""
    stacked = part.prepend_axis_num
    replica = part.replica_id
    if split:  # no other data-parallel rank has this range
        assert isinstance(replica, tuple), f"{part.key}: replica id {replica} names no axes"
        replica = (*replica[:-1], 0)
    values = values[(None,) * stacked]
    return ShardedTensor(
        key=prefix + part.key,
        data=values,
        dtype=values.dtype,
        local_shape=tuple(values.shape),
        global_shape=tuple(part.global_shape),
        global_offset=(
            *part.global_offset[:stacked],
            *(o + p for o, p in zip(offsets, part.global_offset[stacked:], strict=True)),
        ),
        axis_fragmentations=None,
        replica_id=replica,
        allow_shape_mismatch=part.allow_shape_mismatch,
    )
