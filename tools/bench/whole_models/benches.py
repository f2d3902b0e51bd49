"""The benches: which models are compared, and what is timed."""

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
    BenchContender,
    Measure,
    Moved,
    invite,
)
from tools.bench.sizes import GOALS, SMALL
from tools.bench.whole_models import huggingface, stock
from tools.bench.whole_models.model import ModelTerms, number_of_weights
from tools.bench.whole_models.ours import BY_BIAS, NO_LOSSES, aoe, lory, our_model, top_p, topk
from tools.bench.whole_models.sizes import GPU


def against_others(terms: ModelTerms) -> Bench:
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


def curve(terms: ModelTerms) -> Bench:
    """Ours and the fastest peer."""
    ours = [
        our_model("ours, topk", topk(terms.size, *NO_LOSSES), terms),
        our_model("ours, aoe", aoe(terms.size, *NO_LOSSES), terms),
    ]
    peers = _hugging_face(terms, huggingface.IMPLEMENTATIONS[:1])
    return _bench("model", terms, ours, peers)


_GATE = ("--aoe-recompute-gate", "false")


def aoe_with_losses(terms: ModelTerms) -> Bench:
    """AoE and topk of as many parameters, both with the auxiliary loss."""
    loss = ("--moe-aux-loss-coeff", "0.01")
    scores = ("--aoe-recompute-scores", "false")
    variants = {"": (), ", scores kept": scores, ", scores and gate kept": (*scores, *_GATE)}
    ours = [our_model("topk, aux loss", topk(terms.size, *loss), terms)]
    ours += [
        our_model(f"aoe, aux loss, full gradient{kept}", aoe(terms.size, *loss, *flags), terms)
        for kept, flags in variants.items()
    ]
    return _bench("model with aux loss", terms, ours, [])


def aoe_by_bias(terms: ModelTerms) -> Bench:
    """The same balanced by bias, where the selected gradient is exact."""
    selected = aoe(terms.size, *BY_BIAS, "--aoe-gradient", "selected")
    ours = [
        our_model("topk, by bias", topk(terms.size, *BY_BIAS), terms),
        our_model("aoe, by bias, selected gradient", selected, terms),
        our_model("aoe, by bias, selected gradient, gate kept", [*selected, *_GATE], terms),
    ]
    return _bench("model balanced by bias", terms, ours, [])


_EVERY = [against_others, aoe_with_losses, aoe_by_bias]
BENCHES: dict[str, list[Callable[[ModelTerms], Bench]]] = {
    SMALL: _EVERY,
    GOALS: _EVERY,
    GPU: _EVERY,
    "sequence": [curve],
    "experts": [curve],
    "micro-batch": [curve],
}


def _hugging_face(
    terms: ModelTerms, implementations: tuple[str, ...]
) -> list[BenchContender | Absent]:
    return [
        invite(
            huggingface.name_of(terms, implementation),
            partial(huggingface.hugging_face_model, terms, implementation),
        )
        for implementation in implementations
    ]


def _bench(
    op: str,
    terms: ModelTerms,
    ours: list[BenchContender],
    peers: list[BenchContender | Absent],
) -> Bench:
    products = terms.size.products()
    measures = [Measure(FORWARD, products), Measure(BOTH, products.with_gradients())]
    if terms.dtype == torch.float32:
        # In bf16 Hugging Face's optimizer has no fp32 weights, so its work is another.
        # Adam reads and writes weights and two moments, and reads gradients: 7 values of 4 bytes.
        measures.append(Measure(STEP, Moved(7 * 4 * number_of_weights(ours[0]))))
    return Bench(op, terms.size, terms.dtype, ours, peers, tuple(measures))
