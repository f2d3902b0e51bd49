"""The floating-point operations (FLOPs) of a token: those of the matrix products of the formula.

A product of x [D] and W [D, F] takes 2 D F. For one token, one layer and a forward pass, with d the
model width, q the width of all queries (d unless --kv-channels is set), S the tokens of a
sequence, n experts, K of them chosen, and V the padded vocabulary:

    projections   2 * (2 d q + 2 d * width of the keys)      Q, output; K and V
    attention     2 (S + 1) q                                Q K^T and P V of a causal mask: on
                                                             average (S + 1) / 2 keys
    dense         6 d d_ffn                                  SwiGLU of a layer without experts
    scores        2 n d                                      a linear router; AoE: 2 n d d_low, C of
                                                             all experts; with free experts also
                                                             2 for each number of their matrices;
                                                             UoE: 6 n d N_s, the routing neurons
                                                             and their output
    experts       K * 6 d f                                  SwiGLU of width f; AoE, which has C
                                                             already: K * 2 (d_low + 2 d) d_wide;
                                                             UoE: K * 6 d (f - N_s)
    shared        6 d * width                                of the shared expert
    merging       2 * weights of all experts * M / S         a sequence has M = ceil(S / T_s) merges
                                                             and scores (lory), 2 merges and 1 score
                                                             (lory_prefix), or 1 and 1 (smear)
    logits        2 d V                                      once a model, not once a layer

A backward pass takes twice the FLOPs of the forward pass, so a training step takes three times.
Nothing that is computed again is counted (recompute, C for another rank), nor padding, nor losses
on weights, nor what is not a matrix product. These are the model's FLOPs of the PaLM paper
(Chowdhery et al. 2022, arXiv 2204.02311, appendix B), whose share of the peak is MFU, except that
the mask halves attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_parallel.config import Config
from moe_parallel.layers import DispatchedLayer, ExpertLayer, LayerConfig, LayerContext, MergedLayer
from moe_parallel.layers.system import system_of
from moe_parallel.ops import select_backend
from moe_parallel.parallel import groups_of_one
from moe_parallel.telemetry.statistics import RoutingStatistics

FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class TokenFlops:
    """The FLOPs of a token in a forward pass of the whole model; the parts are those above."""

    projections: float
    attention: float
    dense: float
    scores: float
    experts: float
    shared: float
    merging: float
    logits: float

    @property
    def forward(self) -> float:
        return float(sum(astuple(self)))

    @property
    def training(self) -> float:
        """Of a forward and a backward pass."""
        return FORWARD_AND_BACKWARD * self.forward


@dataclass(frozen=True)
class ExpertLayerFlops:
    """The FLOPs of a token in a layer of experts; `choice` is that of one of its K experts."""

    scores: float = 0
    choice: float = 0
    shared: float = 0
    merging: float = 0


def token_flops(config: Config, padded_vocab_size: int, choices_per_token: float) -> TokenFlops:
    """The FLOPs of a token, whatever the layout.

    Args:
        config: of the model and the length of its sequences. A token counts as attending to all
            before it, also with --reset-attention-mask.
        padded_vocab_size: `config.padded_vocab_size` of the tokenizer's.
        choices_per_token: K, or the mean number of experts that compute a token.
    """
    model, layers, d = config.model, config.model.num_layers, config.model.hidden_size
    moe_layers = sum(config.moe_layers)
    queries = model.num_attention_heads * model.head_width
    keys = model.query_groups * model.head_width
    layer = expert_layer_flops(config) if moe_layers else ExpertLayerFlops()
    return TokenFlops(
        projections=layers * 2 * (2 * d * queries + 2 * d * keys),
        attention=layers * 2 * (config.training.seq_length + 1) * queries,
        dense=(layers - moe_layers) * 6 * d * model.ffn_hidden_size,
        scores=moe_layers * layer.scores,
        experts=moe_layers * layer.choice * choices_per_token,
        shared=moe_layers * layer.shared,
        merging=moe_layers * layer.merging,
        logits=2 * d * padded_vocab_size,
    )


@functools.lru_cache(maxsize=64)
def expert_layer_flops(config: Config) -> ExpertLayerFlops:
    """The FLOPs of a layer of experts, by the matrices that it has: whatever its system."""
    layer = _built(config)
    shared = layer.shared if isinstance(layer, DispatchedLayer) else None
    of_shared = 0 if shared is None else _size(shared.parameters())
    of_experts = _size(layer.expert_weights())
    choice = 2 * of_experts / layer.num_experts
    if isinstance(layer, MergedLayer):
        length = config.training.seq_length
        x_SBD = torch.empty(length, 1, config.model.hidden_size, device="meta")
        with FlopCounterMode(display=False) as counter:
            merges = len(layer.merges(x_SBD).weights_MBE)
        scores = counter.get_total_flops() / length
        return ExpertLayerFlops(scores, choice, merging=2 * of_experts * merges / length)
    of_scores = _size(layer.parameters()) - of_experts - of_shared
    return ExpertLayerFlops(2 * of_scores, choice, 2 * of_shared)


def _built(config: Config) -> ExpertLayer:
    """A layer of experts without storage, on one process."""
    selection, n, meta = config.selection, config.num_experts, torch.device("meta")
    context = LayerContext(
        groups_of_one(),
        select_backend("reference"),
        RoutingStatistics(1, n, meta),
        capacity=None,
        num_moe_layers=1,
        hash_table_VK=torch.zeros(1, 1, dtype=torch.int64),
    )
    with meta:
        return system_of(selection).build(
            LayerConfig(config.model.hidden_size, n, config.model.init_method_std),
            selection.rescaled(config),
            config.expert_width,
            context,
        )


def _size(weights: Iterable[torch.Tensor]) -> int:
    """The numbers of the matrices among these weights; each is multiplied with a token."""
    return sum(weight.numel() for weight in weights if weight.dim() > 1)
