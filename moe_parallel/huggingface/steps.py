"""The tensors of an exported model: which tensors of a checkpoint each is made of, and how.

Shape suffixes: E experts, D model width, F expert width, R low-rank size (d_low).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from moe_parallel.config import (
    AutonomousSelection,
    BiasBalancing,
    Config,
    MergedSelection,
    RoutedSelection,
)
from moe_parallel.huggingface.own_model import folded_width, low_rank_size
from moe_parallel.huggingface.places import (
    ExpertNames,
    Place,
    Shape,
    attention,
    dense,
    embedding,
    head,
    shared,
)

Tensors = Iterable[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Some tensors of a checkpoint, read together, and those of the exported model made of them."""

    keys: tuple[str, ...]  # of the checkpoint's tensors
    shapes: tuple[Shape, ...]  # of these tensors
    results: tuple[tuple[str, Shape], ...]  # name and shape of each result, in order
    make: Callable[..., Tensors]  # from the tensors to the results, in order
    always_fp32: bool = False  # whatever the dtype of the export


def plain_steps(places: Iterable[Place]) -> list[Step]:
    """The steps of a plain architecture. Each tensor of the checkpoint is read once."""
    by_key: dict[str, list[Place]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    return [_of_places(parts) for parts in by_key.values()]


def _of_places(places: Sequence[Place]) -> Step:
    def make(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for place in places:
            part = tensor
            for axis, (offset, size) in enumerate(zip(place.offset, place.sizes, strict=True)):
                part = part.narrow(axis, offset, size)
            yield from place.form.split(part)

    results = [pair for place in places for pair in zip(place.names, place.shapes, strict=True)]
    return Step((places[0].key,), (places[0].shape,), tuple(results), make)


def own_steps(config: Config, vocab_size: int, *, fold: bool) -> list[Step]:
    """The steps of our own architecture, layer by layer. `fold`: multiply W_down W_up out."""
    steps = plain_steps(embedding(config, vocab_size))
    for layer, is_moe in enumerate(config.moe_layers):
        steps += plain_steps(attention(config.model, layer))
        if not is_moe:
            steps += plain_steps(dense(config, layer))
        elif isinstance(config.selection, MergedSelection):
            steps += _merged(config, layer)
        else:
            steps += _gate(config, layer, fold) + _experts(config, layer, fold)
            steps += plain_steps(shared(config, layer, ExpertNames()))
    return steps + plain_steps(head(config, vocab_size))


def _one(key: str, shape: Shape, name: str, result: Shape, form: Callable[..., torch.Tensor],
         always_fp32: bool = False) -> Step:  # fmt: skip
    """A step from one tensor to one."""
    return Step((key,), (shape,), ((name, result),), lambda x: [form(x)], always_fp32)


def _same(key: str, name: str, *shape: int, always_fp32: bool = False) -> Step:
    return _one(key, shape, name, shape, lambda x: x, always_fp32)


def _names(layer: int) -> tuple[str, str]:
    return f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"


def _gate(config: Config, layer: int, fold: bool) -> list[Step]:
    """The router, W_down and the balancing bias of a layer."""
    (ours, theirs), selection = _names(layer), config.selection
    n, d = config.num_experts, config.model.hidden_size
    rank, steps = low_rank_size(selection), []
    autonomous = isinstance(selection, AutonomousSelection)
    h = selection.moe_router_hidden_size if isinstance(selection, RoutedSelection) else None
    if h is not None:
        steps.append(_same(f"{ours}.w_router_HD", f"{theirs}.gate.router_in", h, d))
        steps.append(_same(f"{ours}.w_router_EH", f"{theirs}.gate.router_out", n, h))
    elif not autonomous:
        steps.append(_same(f"{ours}.w_router_ED", f"{theirs}.gate.router_out", n, d))
    if rank is not None and (autonomous or not fold):
        steps.append(
            _one(
                f"{ours}.w_down_EDR",
                (n, d, rank),
                f"{theirs}.gate.w_down",
                (n * rank, d),
                lambda w_EDR: w_EDR.transpose(1, 2).flatten(0, 1),
            )
        )
    if isinstance(selection, BiasBalancing) and selection.moe_router_enable_expert_bias:
        key, name = f"{ours}.bias.bias_E", f"{theirs}.gate.expert_bias"
        steps.append(_same(key, name, n, always_fp32=True))
    return steps


def _experts(config: Config, layer: int, fold: bool) -> list[Step]:
    rank = low_rank_size(config.selection)
    if rank is None:
        return _swiglu(config, layer)
    return _folded(config, layer, rank) if fold else _low_rank(config, layer, rank)


def _merged(config: Config, layer: int) -> list[Step]:
    (ours, theirs), n, d = _names(layer), config.num_experts, config.model.hidden_size
    router = _same(f"{ours}.w_router_ED", f"{theirs}.router_out", n, d)
    return [router, *_swiglu(config, layer, within="")]


def _swiglu(config: Config, layer: int, within: str = "experts.") -> list[Step]:
    (ours, theirs), n, d = _names(layer), config.num_experts, config.model.hidden_size
    f = config.expert_width
    return [
        _one(
            f"{ours}.experts.w_gate_up_LD2F",
            (n, d, 2, f),
            f"{theirs}.{within}gate_up_proj",
            (n, 2 * f, d),
            lambda w_ED2F: w_ED2F.permute(0, 2, 3, 1).flatten(1, 2),
        ),
        _out(f"{ours}.experts.w_out_LFD", f"{theirs}.{within}down_proj", n, f, d),
    ]


def _out(key: str, name: str, n: int, f: int, d: int) -> Step:
    return _one(key, (n, f, d), name, (n, d, f), lambda w_EFD: w_EFD.transpose(1, 2))


def _low_rank(config: Config, layer: int, rank: int) -> list[Step]:
    (ours, theirs), n, d = _names(layer), config.num_experts, config.model.hidden_size
    f = config.expert_width
    return [
        _one(
            f"{ours}.experts.w_up_LRW",
            (n, rank, f),
            f"{theirs}.experts.gate_proj",
            (n * f, rank),
            lambda w_ERF: w_ERF.transpose(1, 2).flatten(0, 1),
        ),
        _one(
            f"{ours}.experts.w_p_LDW",
            (n, d, f),
            f"{theirs}.experts.up_proj",
            (n, f, d),
            lambda w_EDF: w_EDF.transpose(1, 2),
        ),
        _out(f"{ours}.experts.w_out_LWD", f"{theirs}.experts.down_proj", n, f, d),
    ]


def _folded(config: Config, layer: int, rank: int) -> list[Step]:
    (ours, theirs), n, d = _names(layer), config.num_experts, config.model.hidden_size
    f, padded = config.expert_width, folded_width(config)
    return [
        Step(
            (f"{ours}.w_down_EDR", f"{ours}.experts.w_up_LRW", f"{ours}.experts.w_p_LDW"),
            ((n, d, rank), (n, rank, f), (n, d, f)),
            ((f"{theirs}.experts.gate_up_proj", (n, 2 * padded, d)),),
            partial(_fold, padded),
        ),
        _one(
            f"{ours}.experts.w_out_LWD",
            (n, f, d),
            f"{theirs}.experts.down_proj",
            (n, d, padded),
            lambda w_EFD: F.pad(w_EFD.transpose(1, 2), (0, padded - f)),
        ),
    ]


def _fold(
    padded: int, w_down_EDR: torch.Tensor, w_up_ERF: torch.Tensor, w_p_EDF: torch.Tensor
) -> Tensors:
    """W_g = W_down W_up above W_p, with zeros up to the width `padded`. W_g is rounded once."""
    e, d, f = w_p_EDF.shape
    gate_up_E2FD = w_p_EDF.new_zeros(e, 2, padded, d)
    for expert in range(e):
        gate_DF = w_down_EDR[expert].double() @ w_up_ERF[expert].double()
        gate_up_E2FD[expert, 0, :f] = gate_DF.T
        gate_up_E2FD[expert, 1, :f] = w_p_EDF[expert].T
    return [gate_up_E2FD.flatten(1, 2)]
