"""The tensors that a forward pass keeps for the backward pass, by name.

t = S B tokens of a micro-batch, d hidden width, H query and G key/value heads of width c on all
ranks, n experts, K per token, f their width, r = d_low. a: bytes of an activation (2 or 4).
Loads are balanced: each rank of a dispatch receives as many rows as it sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Experts, Scoring, Shape
from moe_parallel.plan.weights import ATTENTION, DENSE, EMBEDDING, EXPERTS, HEAD, SCORING

DISPATCH = "dispatch"


@dataclass(frozen=True)
class Kept:
    """A tensor that is kept for the backward pass."""

    name: str
    part: str
    nbytes: int


@dataclass(frozen=True)
class Tokens:
    """The numbers of tokens of a micro-batch, and of rows, that a rank has at a time."""

    all: int  # t
    between: int  # between tensor-parallel regions: t, or t / tp with sequence parallelism
    routed: int  # t / tp, which a rank routes
    sent: int  # rows of the routed tokens' choices: K t / tp
    received: int  # rows that a rank's experts compute, if loads are balanced


def tokens_of(shape: Shape, layout: Layout) -> Tokens:
    """The tokens of a micro-batch of a layout."""
    every = shape.seq_length * layout.micro_batch
    routed = every // layout.tp
    sent = routed * (shape.experts.per_token if shape.experts else 0)
    return Tokens(
        all=every,
        between=every // (layout.tp if layout.sequence_parallel else 1),
        routed=routed,
        sent=sent,
        received=sent * layout.etp,
    )


def kept_by_layer(shape: Shape, layout: Layout, is_moe: bool) -> list[Kept]:
    """What one layer keeps of a micro-batch without recomputation."""
    kept = _attention(shape, layout)
    t, d, a = tokens_of(shape, layout), shape.hidden, shape.value
    part = EXPERTS if is_moe else DENSE
    kept += [
        Kept("pre_mlp_layernorm.x", part, t.between * d * a),
        Kept("pre_mlp_layernorm.rstd", part, t.between * 4),
    ]
    if not is_moe:
        width = shape.dense_width // layout.tp
        return [
            *kept,
            Kept("linear_fc1.x", DENSE, t.between * d * a),
            Kept("gate_up", DENSE, t.all * 2 * width * a),
            Kept("linear_fc2.x", DENSE, t.all * width * a),
        ]
    assert shape.experts is not None
    alone = layout.etp * layout.ep == 1
    if shape.experts.scoring is None:
        kept += _router(shape, t, shape.experts, alone)
    else:
        kept += _norms(shape, t, shape.experts, shape.experts.scoring, alone)
    kept += _choices(t, shape.experts, alone)
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


def kept_beside_recomputed_layers(shape: Shape) -> list[Kept]:
    """What a chunk keeps once if its layers are recomputed."""
    return [Kept("rotary angles", ATTENTION, shape.seq_length * shape.head_width * 4)]


def _attention(shape: Shape, layout: Layout) -> list[Kept]:
    t, d, a, tp = tokens_of(shape, layout), shape.hidden, shape.value, layout.tp
    q, kv = shape.query_width, shape.groups * shape.head_width
    return [
        Kept("input_layernorm.x", ATTENTION, t.between * d * a),
        Kept("input_layernorm.rstd", ATTENTION, t.between * 4),
        Kept("linear_qkv.x", ATTENTION, t.between * d * a),
        *(
            Kept(f"rope.{name}", ATTENTION, shape.seq_length * shape.head_width * a)
            for name in ("cos of q", "sin of q", "cos of k", "sin of k")
        ),
        Kept("q after rope", ATTENTION, t.all * q * a // tp),
        Kept("k after rope", ATTENTION, t.all * kv * a // tp),
        Kept("qkv, of which v is a view", ATTENTION, t.all * shape.qkv_width * a // tp),
        Kept("attention.lse", ATTENTION, t.all * shape.heads * 4 // tp),
        Kept("linear_proj.x", ATTENTION, t.all * q * a // tp),
    ]


def _router(shape: Shape, t: Tokens, experts: Experts, alone: bool) -> list[Kept]:
    n, d = experts.number, shape.hidden
    kept = [
        Kept("router.x, fp32", SCORING, (t.routed if shape.bf16 else t.between) * d * 4),
        Kept("router.logits", SCORING, t.routed * n * 4),
    ]
    if shape.bf16:  # in fp32 these are the weight itself and router.x
        kept.append(Kept("w_router, fp32", SCORING, n * d * 4))
        if alone:
            kept.append(Kept("experts.x", EXPERTS, t.between * d * 2))
    return kept


def _norms(shape: Shape, t: Tokens, experts: Experts, scoring: Scoring, alone: bool) -> list[Kept]:
    n, r, a = experts.number, scoring.rank, shape.value
    # Without sequence parallelism it is a part of a tensor of all tokens.
    x = Kept("scores.x", SCORING, t.between * shape.hidden * a)
    if alone and scoring.joins_norms:
        return [
            x,
            Kept("norms of the choices", SCORING, t.sent * 4),
            Kept("C of the choices", SCORING, t.sent * r * a),
        ]
    kept = [x, Kept("scores.norms", SCORING, t.routed * n * 4)]
    if scoring.all_norms_learn and not scoring.recomputes_scores:
        kept.append(Kept("C of all experts", SCORING, t.routed * n * r * a))
    if alone or (scoring.sends_c and not scoring.all_norms_learn):
        kept.append(Kept("C of the choices", SCORING, t.sent * r * a))
    return kept


def _choices(t: Tokens, experts: Experts, alone: bool) -> list[Kept]:
    n, scoring = experts.number, experts.scoring
    kept = [Kept("probs of the choices", SCORING, t.sent * 4)]
    if not (alone and scoring is not None and scoring.joins_norms):
        kept.append(Kept("experts of the choices", SCORING, t.sent * 8))
    if experts.has_loss:
        kept += [
            Kept("probabilities", SCORING, t.routed * n * 4),
            Kept("shares and means of the loss", SCORING, 2 * n * 4),
            Kept("loss", SCORING, 4),
        ]
    return [
        *kept,
        Kept("row map: slots of rows", DISPATCH, t.sent * 8),
        Kept("row map: rows of slots", DISPATCH, t.sent * 8),
    ]


def _dispatched(shape: Shape, layout: Layout, t: Tokens) -> list[Kept]:
    return [
        Kept("slots of the sent probs", DISPATCH, t.sent * 8),
        Kept("mask of the sent probs", DISPATCH, t.sent * 1),
        Kept("received x", DISPATCH, t.received * shape.hidden * shape.value),
        Kept("received probs", DISPATCH, t.received * 4),
        Kept("received row map: slots of rows", DISPATCH, t.received * 8),
        Kept("received row map: rows of slots", DISPATCH, t.received * 8),
    ]


def _experts(shape: Shape, layout: Layout, t: Tokens, experts: Experts, alone: bool) -> list[Kept]:
    a, width = shape.value, experts.width // layout.etp
    kept = [Kept("rows of each expert", EXPERTS, experts.number // layout.ep * 8)]
    if experts.scoring is None:
        return [*kept, Kept("x [W_g | W_p]", EXPERTS, t.received * 2 * width * a)]
    kept.append(Kept("x W_p", EXPERTS, t.received * width * a))
    if not alone:  # computed here, or received
        kept.append(Kept("C of the rows", EXPERTS, t.received * experts.scoring.rank * a))
    if not experts.scoring.recomputes_gate:
        kept.append(Kept("C W_up", EXPERTS, t.received * width * a))
    return kept
