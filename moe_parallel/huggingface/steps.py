"""The tensors of an exported model: which tensors of a checkpoint each is made of, and how.

Shape suffixes: E experts, D model width, F expert width, R low-rank size (d_low) or routing neurons
of an expert, V token ids, K experts per token, Z free experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from moe_parallel.config import (
    AutonomousSelection,
    Config,
    FreeExperts,
    MergedSelection,
    RoutedSelection,
    RoutingFreeSelection,
    UoESelection,
)
from moe_parallel.huggingface.own_model import (
    dispatched_width,
    folded_width,
    has_bias,
    low_rank_size,
    num_free_experts,
    routing_neurons,
)
from moe_parallel.huggingface.places import (
    ExpertNames,
    Shape,
    TensorPlace,
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


def plain_steps(places: Iterable[TensorPlace]) -> list[Step]:
    """The steps of a plain architecture. Each tensor of the checkpoint is read once."""
    by_key: dict[str, list[TensorPlace]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    return [_of_places(parts) for parts in by_key.values()]


def _of_places(places: Sequence[TensorPlace]) -> Step:
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
            steps += _gate(config, layer, fold) + _table(config, layer, vocab_size)
            steps += _free(config, layer) + _experts(config, layer, fold)
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
    """The router, W_down, the routing neurons and the balancing bias of a layer."""
    (ours, theirs), selection = _names(layer), config.selection
    n, d = config.num_experts, config.model.hidden_size
    scores = n + num_free_experts(selection)
    rank, steps = low_rank_size(selection), _router(config, layer, scores)
    autonomous = isinstance(selection, AutonomousSelection)
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
    name = f"{theirs}.gate.expert_bias"
    if isinstance(selection, RoutingFreeSelection):
        steps.append(_one(f"{ours}.b_E", (n,), name, (n,), torch.neg, always_fp32=True))
    elif has_bias(selection):
        steps.append(_same(f"{ours}.bias.bias_E", name, scores, always_fp32=True))
    return steps


def _router(config: Config, layer: int, scores: int) -> list[Step]:
    """What gives the tokens this number of scores, unless that is W_down alone."""
    (ours, theirs), selection = _names(layer), config.selection
    d = config.model.hidden_size
    if isinstance(selection, UoESelection):
        return _neurons(config, layer)
    if not isinstance(selection, RoutedSelection):
        return []
    h = selection.moe_router_hidden_size
    if h is None:
        return [_same(f"{ours}.w_router_ED", f"{theirs}.gate.router_out", scores, d)]
    return [
        _same(f"{ours}.w_router_HD", f"{theirs}.gate.router_in", h, d),
        _same(f"{ours}.w_router_EH", f"{theirs}.gate.router_out", scores, h),
    ]


def _neurons(config: Config, layer: int) -> list[Step]:
    """The routing neurons of all experts, as a SwiGLU layer of width E R."""
    (ours, theirs), n, d = _names(layer), config.num_experts, config.model.hidden_size
    r = routing_neurons(config)
    return [
        _one(
            f"{ours}.w_gate_up_ED2R",
            (n, d, 2, r),
            f"{theirs}.gate.neurons_in",
            (2 * n * r, d),
            lambda w_ED2R: w_ED2R.permute(2, 0, 3, 1).flatten(0, 2),
        ),
        _one(
            f"{ours}.w_out_ERD",
            (n, r, d),
            f"{theirs}.gate.neurons_out",
            (d, n * r),
            lambda w_ERD: w_ERD.flatten(0, 1).T,
        ),
    ]


def _table(config: Config, layer: int, vocab_size: int) -> list[Step]:
    """The experts of each token id, without those of the ids that pad the vocabulary."""
    (ours, theirs), k = _names(layer), config.selection.choices_per_token
    if not config.selection.reads_token_ids:
        return []
    assert k is not None
    return [
        _one(
            f"{ours}.hash_table.experts_VK",
            (config.padded_vocab_size(vocab_size), k),
            f"{theirs}.gate.expert_table",
            (vocab_size, k),
            lambda experts_VK: experts_VK[:vocab_size],
        )
    ]


def _free(config: Config, layer: int) -> list[Step]:
    """The weights of the free experts. AoE's scores of them are stored in units of a norm."""
    (ours, theirs), selection = _names(layer), config.selection
    if not isinstance(selection, FreeExperts):
        return []
    d, z, c = config.model.hidden_size, selection.free_experts, selection.moe_constant_experts
    steps = []
    if z and isinstance(selection, AutonomousSelection):
        unit = config.model.init_method_std * math.sqrt(d * selection.aoe_low_rank_size)
        name = f"{theirs}.gate.free_scores"
        steps.append(
            _one(f"{ours}.w_free_Z", (z,), name, (z,), lambda w_Z: unit * w_Z.float(), True)
        )
    if c:
        place = f"{theirs}.free_experts"
        steps.append(_same(f"{ours}.w_constant_CAD", f"{place}.w_constant", c, 2, d))
        steps.append(_same(f"{ours}.v_CD", f"{place}.v_constant", c, d))
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
    f = dispatched_width(config)
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
