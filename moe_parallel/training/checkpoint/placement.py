"""Placement: which experts share a rank, from the choices of a run, and a checkpoint of that order.

Rank r of ep holds the experts n r / ep .. n (r + 1) / ep - 1, and a token travels once to each rank
that has experts of its choice. So fewer rows travel if experts that are chosen together have
neighboring numbers (Expert Coupling, arXiv 2610.09372). For each layer, with A_t the experts of
token t in a trace, `place` minimizes over the assignments rank(e) with n / ep experts on each rank

    sum_t |{rank(e) : e in A_t}|  +  ep sum_r max(0, load_r - LOAD_BOUND mean load)

load_r is the number of choices that rank r computes. A choice beyond the bound costs a row for each
rank, because all ranks wait for the one that computes most. This is balanced partitioning of a
hypergraph, whose edges are the tokens, by connectivity minus one. From the order that is there, the
best exchange of two experts is made until none saves a row (Kernighan and Lin 1970). From greedy
clusters and from random orders, tokens of later steps visited as many ranks, within 2%.

The model stays the same: each tensor that has an axis of experts takes their new order, which its
name says, as all names here end in the shape. Its outputs are equal up to rounding, because
products and sums over the experts are taken in another order.

Shape suffixes: T tokens, E experts, R ranks; of a trace L layers, N sequences, S tokens of a
sequence, K slots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_parallel.config import Config, MergedSelection
from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.errors import InputError
from moe_parallel.telemetry.router_trace import RecordedTrace, TraceShape, check_shape
from moe_parallel.training.checkpoint.folder import CheckpointFolder
from moe_parallel.training.checkpoint.index import data_files, read_index, stored_shapes
from moe_parallel.training.checkpoint.inspection import rewrite
from moe_parallel.training.router_trace import trace_shape

LOAD_BOUND = 1.05  # of the mean load
MOST_TOKENS = 2**14  # of a layer, to which its placement is fitted
#: In the folder of a run: by layer, from 1, the number that each expert had at first.
NAMES = "placement.json"
FLAG = "--expert-model-parallel-size"

# Groups: the number of an MoE layer from 0, the name of a tensor of it, its shape suffix.
_OF_LAYER = re.compile(r"(?:.+\.)?decoder\.layers\.(\d+)\.mlp\.(?:.+\.)?(\w+?)(?:_([A-Z0-9]+))?")
#: Parts of an MoE layer that know no experts: norm, shared expert, what moves a threshold.
_WITHOUT_EXPERTS = re.compile(r".+\.mlp\.(?:linear_fc[12]|shared|controller)\..+")
_TABLE = "experts"  # a tensor of this name contains numbers of experts

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Visits:
    """What a placement costs on some steps of a trace."""

    rows: float  # ranks that a token visits, on average
    imbalance: float  # the load of the busiest rank over the mean load, the mean of the steps


@dataclass(frozen=True)
class PlacedLayer:
    """A layer whose experts have a new order."""

    number: int  # in the model, from 1
    order_E: Array  # at each number, the number of the expert before
    before: Visits
    after: Visits


@dataclass(frozen=True)
class Placement:
    """The new order of the experts of a model."""

    layers: Sequence[PlacedLayer]
    fitted: range  # the iterations to which it was fitted
    measured: range  # those of `before` and `after`: later ones if there are any


def fit(config: Config, trace: RecordedTrace, ranks: int) -> Placement:
    """The placement of a model by a trace of its choices: fitted to the first three quarters of the
    steps, measured on the rest.

    Raises InputError.
    """
    n = _placeable(config, ranks)
    own = trace_shape(config)
    check_shape(
        trace.folder,
        trace.flag,
        trace.shape,
        TraceShape(own.layers, own.num_experts, *_batch(trace.shape), own.slots),
    )
    steps = trace.iterations
    last = max(1, len(steps) * 3 // 4)
    fitted, measured = steps[:last], steps[last:] or steps
    layers = []
    for place, number in enumerate(own.layers):
        order_E = fit_layer(np.concatenate([*_chosen(trace, fitted, place, n)]), ranks)
        of_steps = [*_chosen(trace, measured, place, n)]
        before, after = (visits(of_steps, order, ranks) for order in (np.arange(n), order_E))
        layers.append(PlacedLayer(number, order_E, before, after))
    return Placement(layers, fitted, measured)


def _batch(shape: TraceShape) -> tuple[int, int]:
    """The sizes of a trace in which it may differ from a checkpoint's run."""
    return shape.sequences, shape.length


def _placeable(config: Config, ranks: int) -> int:
    """The number of experts; raises InputError with the reason why they cannot be placed."""
    selection = config.selection
    if config.moe.num_experts is None:
        raise InputError("the checkpoint is of a dense model: there are no experts to place")
    if isinstance(selection, MergedSelection):
        raise InputError(
            f"--expert-selection {selection.system} merges its experts and sends no token to "
            "another rank: there is nothing to place"
        )
    if getattr(selection, "moe_router_num_groups", None) is not None:
        raise InputError(
            "--moe-router-num-groups makes groups of experts with neighboring numbers: in another "
            "order the model would choose others"
        )
    if ranks < 2 or config.num_experts % ranks:
        raise InputError(
            f"{FLAG} is {ranks}: it must be at least 2 and divide --num-experts "
            f"{config.num_experts}"
        )
    return config.num_experts


def _chosen(trace: RecordedTrace, steps: range, place: int, n: int) -> Iterator[Array]:
    """Of each step, whether a token chose an expert: bool [T, n]. Free experts do not count."""
    for iteration in steps:
        experts_TK = trace.step(iteration).experts_LNSK[place].reshape(-1, trace.shape.slots)
        chosen_TE = np.zeros((len(experts_TK), trace.shape.num_experts + 1), dtype=bool)
        np.put_along_axis(chosen_TE, experts_TK.astype(np.int64), True, axis=1)  # -1: the last
        yield chosen_TE[:, :n]


def visits(of_steps: Sequence[Array], order_E: Array, ranks: int) -> Visits:
    """What an order of the experts costs. `of_steps`: bool [T, E] of each step."""
    rows, tokens, ratios = 0, 0, []
    for chosen_TE in of_steps:
        by_rank_TR = chosen_TE[:, order_E].reshape(len(chosen_TE), ranks, -1).sum(axis=2)
        load_R = by_rank_TR.sum(axis=0)
        rows, tokens = rows + int((by_rank_TR > 0).sum()), tokens + len(chosen_TE)
        ratios.append(load_R.max() / max(load_R.mean(), 1e-9))
    return Visits(rows / tokens, float(np.mean(ratios)))


def fit_layer(chosen_TE: Array, ranks: int) -> Array:
    """The order of the experts of a layer: int64 [E], at each number that of the expert before.

    The cost of a rank depends on its experts alone. So an exchange keeps its gain when experts of
    other ranks are exchanged, and a round makes the best one, the best one of other ranks, ...

    `chosen_TE`: bool, of tokens in the order of a run.
    """
    every = -(-len(chosen_TE) // MOST_TOKENS)
    chosen_TE = chosen_TE[::every].astype(np.float32)  # products of whole numbers, exact to 2^24
    n = chosen_TE.shape[1]
    rank_E = np.arange(n) // (n // ranks)
    load_E = chosen_TE.sum(axis=0, dtype=np.float64)
    bound = LOAD_BOUND * load_E.sum() / ranks

    def excess(load: Array) -> Array:
        return ranks * np.maximum(load - bound, 0)

    exchanged = True
    while exchanged:
        there_RE = rank_E == np.arange(ranks)[:, None]
        by_rank_TR = chosen_TE @ there_RE.T.astype(np.float32)
        alone_TE = chosen_TE * (by_rank_TR == 1)[:, rank_E]
        # If expert i leaves its rank, the tokens stay away that have no other expert there. Those
        # come to the rank of j that had none there. A token with both experts does neither.
        leave_E = alone_TE.sum(axis=0, dtype=np.float64)
        come_ER = chosen_TE.T @ (by_rank_TR == 0).astype(np.float32)
        fewer_EE = leave_E[:, None] - come_ER[:, rank_E] - alone_TE.T @ chosen_TE
        load_E1 = (there_RE @ load_E)[rank_E][:, None]  # of the rank of i
        fewer_EE += excess(load_E1) - excess(load_E1 + load_E - load_E[:, None])
        gain_EE = fewer_EE + fewer_EE.T
        gain_EE[rank_E[:, None] == rank_E] = 0
        exchanged = gain_EE.max() >= 1
        while gain_EE.max() >= 1:
            i, j = np.unravel_index(gain_EE.argmax(), gain_EE.shape)
            touched_E = np.isin(rank_E, rank_E[[i, j]])
            gain_EE[touched_E] = 0
            gain_EE[:, touched_E] = 0
            rank_E[i], rank_E[j] = rank_E[j], rank_E[i]
    members = sorted(np.flatnonzero(rank_E == rank).tolist() for rank in range(ranks))
    return np.array(members).flatten()


def place(checkpoint: Path, folder: CheckpointFolder, placement: Placement) -> Path:
    """Write `checkpoint` with its experts in the new order into a new run folder; returns its path.

    The folder gets the file NAMES, too. Memory and what is left out: see `rewrite`.

    Raises:
        InputError: the folder has checkpoints, or the checkpoint is damaged or has a tensor of
            which it is unknown whether it has an axis of experts.
        StorageError: a file cannot be read.
        OSError: the disk is full or cannot be written.
    """
    if folder.iterations():
        raise InputError(f"{folder.directory} has checkpoints already: name a new folder")
    orders = {layer.number: torch.from_numpy(layer.order_E) for layer in placement.layers}
    for key, shape in stored_shapes(checkpoint).items():
        _ordered_by(key, len(shape), orders)  # raises errors before the long work

    def change(key: str, tensor: torch.Tensor) -> torch.Tensor:
        found = _ordered_by(key, tensor.dim(), orders)
        if found is None:
            return tensor
        order_E, axis = found
        if axis is None:
            return order_E.argsort()[tensor]
        free = torch.arange(len(order_E), tensor.shape[axis])  # free experts have the last numbers
        return tensor.index_select(axis, torch.cat([order_E, free]))

    files = len(data_files(read_index(checkpoint)))
    written = rewrite(checkpoint, folder, files, change)
    names = _names(checkpoint)
    for layer in placement.layers:
        first = names.get(str(layer.number), range(len(layer.order_E)))
        names[str(layer.number)] = [first[expert] for expert in layer.order_E]
    write_atomically(folder.directory / NAMES, json.dumps(names) + "\n")
    return written


def _ordered_by(
    key: str, axes: int, orders: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, int | None] | None:
    """The new order of a tensor's experts, and their axis; None: its values are the experts.

    Returns None if the tensor has no experts. Raises InputError if that is unknown.
    """
    match = _OF_LAYER.fullmatch(key)
    if match is None or int(match[1]) + 1 not in orders or _WITHOUT_EXPERTS.fullmatch(key):
        return None
    order_E, suffix = orders[int(match[1]) + 1], match[3] or ""
    if len(suffix) != axes:
        raise InputError(
            f"{key} has {axes} axes, which its name does not list, so it is unknown which of them "
            "is that of the experts: name it as w_router_ED, with E for the experts"
        )
    if match[2] == _TABLE:
        return order_E, None
    axis = next((axis for axis, letter in enumerate(suffix) if letter in "EL"), None)
    return None if axis is None else (order_E, axis)


def _names(checkpoint: Path) -> dict[str, list[int]]:
    """The numbers that the experts of a checkpoint had at first. Raises InputError."""
    file = checkpoint.parent / NAMES
    try:
        return dict(json.loads(file.read_text())) if file.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}): remove or restore it") from error
