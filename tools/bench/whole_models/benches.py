"""The benches: which models stand beside each other, and what is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tools.bench.contender import (
    BOTH,
    FORWARD,
    STEP,
    Absent,
    Bench,
    Contender,
    Measure,
    Moved,
    invite,
)
from tools.bench.sizes import GOALS, SMALL
from tools.bench.whole_models import huggingface, stock
from tools.bench.whole_models.model import Terms, number_of_weights
from tools.bench.whole_models.ours import BY_BIAS, NO_LOSSES, aoe, lory, our_model, top_p, topk


def against_others(terms: Terms) -> Bench:
    """Our systems, Megatron-Core's stock model, and Hugging Face's; no auxiliary losses."""
    size = terms.size
    systems = {
        "ours, topk": topk(size, *NO_LOSSES),
        "ours, aoe": aoe(size, *NO_LOSSES),
        "ours, top_p": top_p(*NO_LOSSES),
        "ours, lory": lory(size),
    }
    ours = [our_model(name, flags, terms) for name, flags in systems.items()]
    peers = [invite(stock.NAME, partial(stock.stock_model, terms))]
    peers += _hugging_face(terms, huggingface.IMPLEMENTATIONS)
    return _bench("model", terms, ours, peers)


def curve(terms: Terms) -> Bench:
    """Ours beside the fastest peer."""
    ours = [
        our_model("ours, topk", topk(terms.size, *NO_LOSSES), terms),
        our_model("ours, aoe", aoe(terms.size, *NO_LOSSES), terms),
    ]
    peers = _hugging_face(terms, huggingface.IMPLEMENTATIONS[:1])
    return _bench("model", terms, ours, peers)


def aoe_with_losses(terms: Terms) -> Bench:
    """AoE beside topk of as many parameters, both with the auxiliary loss."""
    loss = ("--moe-aux-loss-coeff", "0.01")
    ours = [
        our_model("topk, aux loss", topk(terms.size, *loss), terms),
        our_model("aoe, aux loss, full gradient", aoe(terms.size, *loss), terms),
    ]
    return _bench("model with aux loss", terms, ours, [])


def aoe_by_bias(terms: Terms) -> Bench:
    """The same balanced by bias, where the selected gradient is exact."""
    selected = aoe(terms.size, *BY_BIAS, "--aoe-gradient", "selected")
    ours = [
        our_model("topk, by bias", topk(terms.size, *BY_BIAS), terms),
        our_model("aoe, by bias, selected gradient", selected, terms),
    ]
    return _bench("model balanced by bias", terms, ours, [])


BENCHES: dict[str, list[Callable[[Terms], Bench]]] = {
    SMALL: [against_others, aoe_with_losses, aoe_by_bias],
    GOALS: [against_others, aoe_with_losses, aoe_by_bias],
    "sequence": [curve],
    "experts": [curve],
    "micro-batch": [curve],
}


def _hugging_face(terms: Terms, implementations: tuple[str, ...]) -> list[Contender | Absent]:
    return [
        invite(
            huggingface.name_of(terms, implementation),
            partial(huggingface.hugging_face_model, terms, implementation),
        )
        for implementation in implementations
    ]


def _bench(
    op: str,
    terms: Terms,
    ours: list[Contender],
    peers: list[Contender | Absent],
) -> Bench:
    products = terms.size.products()
    measures = [Measure(FORWARD, products), Measure(BOTH, products.with_gradients())]
    if terms.dtype == torch.float32:
        # In bf16 Hugging Face's optimizer has no fp32 weights, so its work is another.
        # Adam reads and writes weights and two moments, and reads gradients: 7 values of 4 bytes.
        measures.append(Measure(STEP, Moved(7 * 4 * number_of_weights(ours[0]))))
    return Bench(op, terms.size, terms.dtype, ours, peers, tuple(measures))
