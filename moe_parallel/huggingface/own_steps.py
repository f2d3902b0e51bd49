"""The tensors of a layer of experts in our own architecture (`moe_parallel.hf`).

Shape suffixes: E experts, D model width, F expert width, R low-rank size (d_low) or routing neurons
of an expert, V token ids, K experts per token, Z free experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from moe_parallel.config import Config, Selection
from moe_parallel.huggingface.places import ExpertNames, shared
from moe_parallel.huggingface.steps import Step, Tensors, one_step, plain_steps, same_step

_TILE = 16  # Eq. 5 of AoE gives any width, and kernels want rows of a multiple of 16 bytes or more


@dataclass(frozen=True)
class LayerSource:
    """A layer of experts in a checkpoint."""

    config: Config
    layer: int  # from 0
    vocab_size: int  # of the tensors that are written, without our padding
    fold: bool  # multiply W_g = W_down W_up out

    @property
    def names(self) -> tuple[str, str]:
        """The beginnings of the names of our tensors and of theirs."""
        return f"decoder.layers.{self.layer}.mlp", f"model.layers.{self.layer}.mlp"

    @property
    def selection(self) -> Any:
        """The options of the system; each function below knows which there are."""
        return self.config.selection

    @property
    def width(self) -> int:
        """d, the width of the model."""
        return self.config.model.hidden_size

    @property
    def scores(self) -> int:
        """The number of scores of a token."""
        return self.config.num_experts + self.config.selection.free_experts


def folded_width(config: Config) -> int:
    """The width of a folded expert: that of the run, rounded up to whole tiles of the kernels.

    The columns that are added are 0 and change no output.
    """
    return -(-config.expert_width // _TILE) * _TILE


def dispatched_width(config: Config) -> int:
    """The width of an expert without its routing neurons."""
    return config.selection.dispatched_width(config.expert_width, config.num_experts)


def routing_neurons(config: Config) -> int:
    """How many neurons of an expert compute every token. 0: the system has none."""
    return config.expert_width - dispatched_width(config)


def low_rank_size(selection: Selection) -> int | None:
    """d_low of experts with a factorized W_g. None: W_g is one matrix."""
    sizes = selection.low_rank_sizes
    return sizes[0][1] if sizes else None


def routed_steps(source: LayerSource) -> list[Step]:
    """A layer with a router. A factorized W_g that is folded has no W_down."""
    rank = low_rank_size(source.selection)
    w_down = [] if rank is None or source.fold else [_w_down(source, rank)]
    return _dispatched(source, [*_router(source), *w_down, *_bias(source)])


def autonomous_steps(source: LayerSource) -> list[Step]:
    """A layer of AoE. Its scores of free experts are stored in units of a norm."""
    (ours, theirs), selection = source.names, source.selection
    rank, z = selection.aoe_low_rank_size, selection.free_experts
    gate = [_w_down(source, rank), *_bias(source)]
    if z:
        unit = source.config.model.init_method_std * math.sqrt(source.width * rank)
        name = f"{theirs}.gate.free_scores"
        gate.append(
            one_step(f"{ours}.w_free_Z", (z,), name, (z,), lambda w_Z: unit * w_Z.float(), True)
        )
    return _dispatched(source, gate)


def routing_free_steps(source: LayerSource) -> list[Step]:
    """A layer of Routing-Free MoE. Its biases are subtracted from norms; an exported one adds."""
    (ours, theirs), n = source.names, source.config.num_experts
    name = f"{theirs}.gate.expert_bias"
    bias = one_step(f"{ours}.b_E", (n,), name, (n,), torch.neg, always_fp32=True)
    return _dispatched(source, [_w_down(source, source.selection.aoe_low_rank_size), bias])


def union_steps(source: LayerSource) -> list[Step]:
    """A layer of UoE."""
    return _dispatched(source, [*_neurons(source), *_bias(source)])


def merged_steps(source: LayerSource) -> list[Step]:
    """A layer that merges its experts."""
    (ours, theirs), n = source.names, source.config.num_experts
    router = same_step(f"{ours}.w_router_ED", f"{theirs}.router_out", n, source.width)
    return [router, *_swiglu(source, within="")]


def _dispatched(source: LayerSource, gate: list[Step]) -> list[Step]:
    """A layer that dispatches tokens; `gate` makes the scores."""
    steps = [*gate, *_table(source), *_constants(source), *_experts(source)]
    return steps + plain_steps(shared(source.config, source.layer, ExpertNames()))


def _w_down(source: LayerSource, rank: int) -> Step:
    (ours, theirs), n, d = source.names, source.config.num_experts, source.width
    return one_step(
        f"{ours}.w_down_EDR",
        (n, d, rank),
        f"{theirs}.gate.w_down",
        (n * rank, d),
        lambda w_EDR: w_EDR.transpose(1, 2).flatten(0, 1),
    )


def _bias(source: LayerSource) -> list[Step]:
    """The balancing bias or the cutoffs."""
    (ours, theirs), name = source.names, "gate.expert_bias"
    if not source.selection.adds_bias:
        return []
    return [same_step(f"{ours}.bias.bias_E", f"{theirs}.{name}", source.scores, always_fp32=True)]


def _router(source: LayerSource) -> list[Step]:
    (ours, theirs), d = source.names, source.width
    h = source.selection.moe_router_hidden_size
    if h is None:
        return [same_step(f"{ours}.w_router_ED", f"{theirs}.gate.router_out", source.scores, d)]
    return [
        same_step(f"{ours}.w_router_HD", f"{theirs}.gate.router_in", h, d),
        same_step(f"{ours}.w_router_EH", f"{theirs}.gate.router_out", source.scores, h),
    ]


def _neurons(source: LayerSource) -> list[Step]:
    """The routing neurons of all experts, as a SwiGLU layer of width E R."""
    (ours, theirs), n, d = source.names, source.config.num_experts, source.width
    r = routing_neurons(source.config)
    return [
        one_step(
            f"{ours}.w_gate_up_ED2R",
            (n, d, 2, r),
            f"{theirs}.gate.neurons_in",
            (2 * n * r, d),
            lambda w_ED2R: w_ED2R.permute(2, 0, 3, 1).flatten(0, 2),
        ),
        one_step(
            f"{ours}.w_out_ERD",
            (n, r, d),
            f"{theirs}.gate.neurons_out",
            (d, n * r),
            lambda w_ERD: w_ERD.flatten(0, 1).T,
        ),
    ]


def _table(source: LayerSource) -> list[Step]:
    """The experts of each token id, without those of the ids that pad the vocabulary."""
    (ours, theirs), k = source.names, source.selection.choices_per_token
    size = source.vocab_size
    if not source.selection.reads_token_ids:
        return []
    return [
        one_step(
            f"{ours}.hash_table.experts_VK",
            (source.config.padded_vocab_size(size), k),
            f"{theirs}.gate.expert_table",
            (size, k),
            lambda experts_VK: experts_VK[:size],
        )
    ]


def _constants(source: LayerSource) -> list[Step]:
    """The weights of the free experts with a learned vector."""
    (ours, theirs), d, c = source.names, source.width, source.selection.free_kinds.constant
    if not c:
        return []
    place = f"{theirs}.free_experts"
    return [
        same_step(f"{ours}.w_constant_CAD", f"{place}.w_constant", c, 2, d),
        same_step(f"{ours}.v_CD", f"{place}.v_constant", c, d),
    ]


def _experts(source: LayerSource) -> list[Step]:
    rank = low_rank_size(source.selection)
    if rank is None:
        return _swiglu(source)
    return _folded(source, rank) if source.fold else _low_rank(source, rank)


def _swiglu(source: LayerSource, within: str = "experts.") -> list[Step]:
    (ours, theirs), n, d = source.names, source.config.num_experts, source.width
    f = dispatched_width(source.config)
    return [
        one_step(
            f"{ours}.experts.w_gate_up_LD2F",
            (n, d, 2, f),
            f"{theirs}.{within}gate_up_proj",
            (n, 2 * f, d),
            lambda w_ED2F: w_ED2F.permute(0, 2, 3, 1).flatten(1, 2),
        ),
        _out(f"{ours}.experts.w_out_LFD", f"{theirs}.{within}down_proj", n, f, d),
    ]


def _out(key: str, name: str, n: int, f: int, d: int) -> Step:
    return one_step(key, (n, f, d), name, (n, d, f), lambda w_EFD: w_EFD.transpose(1, 2))


def _low_rank(source: LayerSource, rank: int) -> list[Step]:
    (ours, theirs), n, d = source.names, source.config.num_experts, source.width
    f = source.config.expert_width
    return [
        one_step(
            f"{ours}.experts.w_up_LRW",
            (n, rank, f),
            f"{theirs}.experts.gate_proj",
            (n * f, rank),
            lambda w_ERF: w_ERF.transpose(1, 2).flatten(0, 1),
        ),
        one_step(
            f"{ours}.experts.w_p_LDW",
            (n, d, f),
            f"{theirs}.experts.up_proj",
            (n, f, d),
            lambda w_EDF: w_EDF.transpose(1, 2),
        ),
        _out(f"{ours}.experts.w_out_LWD", f"{theirs}.experts.down_proj", n, f, d),
    ]


def _folded(source: LayerSource, rank: int) -> list[Step]:
    (ours, theirs), n, d = source.names, source.config.num_experts, source.width
    f, padded = source.config.expert_width, folded_width(source.config)
    return [
        Step(
            (f"{ours}.w_down_EDR", f"{ours}.experts.w_up_LRW", f"{ours}.experts.w_p_LDW"),
            ((n, d, rank), (n, rank, f), (n, d, f)),
            ((f"{theirs}.experts.gate_up_proj", (n, 2 * padded, d)),),
            partial(_fold, padded),
        ),
        one_step(
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
