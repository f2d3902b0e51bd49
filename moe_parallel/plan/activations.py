"""The tensors that a forward pass keeps for the backward pass, by name.

t = S B / cp tokens of a micro-batch on a rank, d hidden width, H query and G key/value heads of
width c on all ranks, n experts, K per token, f their width, r = d_low. a: bytes of an activation (2
or 4).
Loads are balanced: each rank of a dispatch receives as many rows as it sends.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_parallel.config import recompute
from moe_parallel.config.selection import SharedExpertSize
from moe_parallel.plan.experts import PlannedExperts
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.routing import DISPATCH, kept_by_routing
from moe_parallel.plan.shape import Shape
from moe_parallel.plan.tokens import Kept, TokenCounts, tokens_of
from moe_parallel.plan.weights import ATTENTION, DENSE, EMBEDDING, EXPERTS, HEAD, SHARED


def kept_by_layer(shape: Shape, layout: Layout, is_moe: bool) -> list[Kept]:
    """What one layer keeps of a micro-batch without full recomputation."""
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    part, again = EXPERTS if is_moe else DENSE, layout.recompute_modules
    kept = _attention(shape, layout)
    kept += _norm("pre_mlp_layernorm", part, shape, t)
    if (recompute.EXPERTS if is_moe else recompute.DENSE) in again:
        kept.append(Kept("input", part, t.between * d * a, of_norm=True))
    elif is_moe:
        kept += _layer_of_experts(shape, layout)
    else:
        width = shape.dense_width // layout.tp
        kept += [
            Kept("linear_fc1.x", DENSE, t.between * d * a, of_norm=True),
            Kept("gate_up", DENSE, t.all * 2 * width * a),
            Kept("linear_fc2.x", DENSE, t.all * width * a),
        ]
    if recompute.NORM in again:
        return [each for each in kept if not each.of_norm]
    return kept


def _norm(name: str, part: str, shape: Shape, t: TokenCounts) -> list[Kept]:
    return [
        Kept(f"{name}.x", part, t.between * shape.hidden * shape.value),
        Kept(f"{name}.rstd", part, t.between * 4, of_norm=True),
    ]


def _layer_of_experts(shape: Shape, layout: Layout) -> list[Kept]:
    assert shape.experts is not None
    t, alone = tokens_of(shape, layout), layout.etp * layout.ep == 1
    kept = kept_by_routing(shape, layout)
    if shape.experts.shared is not None:
        kept += _shared(shape, layout, t, shape.experts.shared)
    if not alone:
        kept += _dispatched(shape, layout, t)
    return kept + _experts(shape, layout, t, shape.experts, alone)


def kept_by_embedding(shape: Shape, layout: Layout) -> list[Kept]:
    """What the embedding keeps of a micro-batch."""
    t = tokens_of(shape, layout)
    kept = [Kept("tokens", EMBEDDING, t.all * 8)]
    if layout.tp > 1:
        kept.append(Kept("tokens of other ranks", EMBEDDING, t.all * 1))
    return kept


def kept_by_head(shape: Shape, layout: Layout) -> list[Kept]:
    """What the last norm, the output layer and the loss keep of a micro-batch."""
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    return [
        Kept("final_layernorm.x", HEAD, t.between * d * a),
        Kept("final_layernorm.rstd", HEAD, t.between * 4),
        Kept("output_layer.dx", HEAD, t.all * d * a),
        Kept("output_layer.dw", HEAD, shape.vocabulary // layout.tp * d * 4),
        Kept("weights of the losses", HEAD, t.all * 4),
    ]


def kept_by_recomputed_layer(shape: Shape, layout: Layout) -> list[Kept]:
    """What is kept of a layer that is recomputed: its input."""
    t = tokens_of(shape, layout)
    return [Kept("input of the layer", ATTENTION, t.between * shape.hidden * shape.value)]


def kept_beside_layers(shape: Shape, layout: Layout) -> list[Kept]:
    """What a chunk keeps once for all its layers, and for all micro-batches in flight."""
    tokens = shape.seq_length // layout.cp
    return [Kept("rotary angles", ATTENTION, tokens * shape.head_width * 4)]


def _attention(shape: Shape, layout: Layout) -> list[Kept]:
    t, d, a, tp = tokens_of(shape, layout), shape.hidden, shape.value, layout.tp
    q, kv = shape.query_width, shape.groups * shape.head_width
    again = recompute.CORE_ATTENTION in layout.recompute_modules
    kept = [
        *_norm("input_layernorm", ATTENTION, shape, t),
        Kept("linear_qkv.x", ATTENTION, t.between * d * a, of_norm=True),
        Kept("q after rope", ATTENTION, t.all * q * a // tp),
        Kept("linear_proj.x", ATTENTION, t.all * q * a // tp),
    ]
    lse = t.all * shape.heads * 4 // tp
    if layout.cp > 1 and not again:
        # Of the two chunks of a share; the last rank's are neighbors, and it keeps less.
        kept += 2 * [Kept("attention.y of a chunk", ATTENTION, t.all * q * a // tp // 2)]
        kept += 2 * [Kept("attention.lse of a chunk", ATTENTION, lse // 2)]
        whole = t.all * layout.cp * 2 * kv * a // tp
        return [*kept, Kept("k and v of whole sequences", ATTENTION, whole)]
    kept += [
        Kept("k after rope", ATTENTION, t.all * kv * a // tp),
        Kept("v", ATTENTION, t.all * kv * a // tp),
    ]
    return [
        *kept,
        Kept("kind of mask", ATTENTION, 4) if again else Kept("attention.lse", ATTENTION, lse),
    ]


def _shared(
    shape: Shape, layout: Layout, t: TokenCounts, shared: SharedExpertSize
) -> Iterator[Kept]:
    """What the shared expert keeps in addition to what its layer keeps anyway."""
    d, a, width = shape.hidden, shape.value, shared.width // layout.tp
    if recompute.SHARED in layout.recompute_modules:
        return
    yield Kept("shared gate_up", SHARED, t.all * 2 * width * a)
    yield Kept("shared_fc2.x", SHARED, t.all * width * a)
    if not shared.gate:
        return
    yield Kept("shared y", SHARED, t.between * d * a)
    yield Kept("gate of the shared expert", SHARED, t.between * 4)
    if shape.bf16:
        yield Kept("gate of the shared expert, bf16", SHARED, t.between * 2)


def _dispatched(shape: Shape, layout: Layout, t: TokenCounts) -> list[Kept]:
    return [
        Kept("received rows", DISPATCH, t.received * shape.packed_row),
        Kept("received probs", DISPATCH, t.received * 4),
        Kept("received row map: slots of rows", DISPATCH, t.received * 8),
        Kept("received row map: rows of slots", DISPATCH, t.received * 8),
    ]


def _experts(
    shape: Shape, layout: Layout, t: TokenCounts, experts: PlannedExperts, alone: bool
) -> list[Kept]:
    a, width = shape.value, experts.width // layout.etp
    kept = [Kept("rows of each expert", EXPERTS, experts.number // layout.ep * 8)]
    if experts.low_rank is None:
        return [*kept, Kept("x [W_g | W_p]", EXPERTS, t.received * 2 * width * a)]
    kept.append(Kept("x W_p", EXPERTS, t.received * width * a))
    norms = experts.norms
    has_c = norms is not None and (norms.passes_on_c if alone else norms.sends_c)
    if not has_c:  # of the choices, or in the received rows
        kept.append(Kept("C of the rows", EXPERTS, t.received * experts.low_rank * a))
    if experts.norms is not None and not experts.norms.recomputes_gate:
        kept.append(Kept("C W_up", EXPERTS, t.received * width * a))
    return kept
