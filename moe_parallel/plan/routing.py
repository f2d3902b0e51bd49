"""The tensors that scores, selection, losses and free experts keep for the backward pass.

The symbols are those of `activations`. What a rule and its losses keep is declared by the
configuration of the system (`config.selection.kept`); the layers are described here.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_parallel.config.selection.kept import EXPERTS as CHOSEN
from moe_parallel.config.selection.kept import PROBS, SCORES, Neurons, Scoring
from moe_parallel.plan.experts import Free, PlannedExperts
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Shape
from moe_parallel.plan.tokens import Kept, TokenCounts, tokens_of
from moe_parallel.plan.weights import SCORING

DISPATCH = "dispatch"


def kept_by_routing(shape: Shape, layout: Layout) -> list[Kept]:
    """What a layer of experts keeps besides its dispatch and its experts."""
    experts = shape.experts
    assert experts is not None
    t, alone = tokens_of(shape, layout), layout.etp * layout.ep == 1
    kept: list[Kept] = []
    if isinstance(experts.scoring, Scoring):
        kept += _norms(shape, t, experts, experts.scoring, alone)
    elif isinstance(experts.scoring, Neurons):
        kept += _neurons(shape, t, experts, experts.scoring)
    else:
        kept += _router(shape, t, experts)
    kept += _selection(t, experts, layout, alone)
    if experts.free is not None:
        kept += _free(shape, t, experts.free)
    if experts.routing.coupled:
        kept += _coupling(shape, layout, experts)
    return kept


def _router(shape: Shape, t: TokenCounts, experts: PlannedExperts) -> Iterator[Kept]:
    yield Kept("router.x", SCORING, t.between * shape.hidden * shape.value, of_norm=True)
    if experts.router_hidden is not None:
        yield Kept("hidden of the router", SCORING, t.routed * experts.router_hidden * 4)
    if not shape.bf16:  # in fp32 these are the weight itself and router.x
        return
    for weight in experts.replicated:
        if weight.in_fp32:
            yield Kept(f"{weight.name}, fp32", SCORING, weight.size * 4)


def _norms(
    shape: Shape, t: TokenCounts, experts: PlannedExperts, scoring: Scoring, alone: bool
) -> Iterator[Kept]:
    n, r, a = experts.number, scoring.rank, shape.value
    # Without sequence parallelism it is a part of a tensor of all tokens.
    yield Kept("scores.x", SCORING, t.between * shape.hidden * a, of_norm=True)
    if alone and scoring.joins_norms:
        yield Kept("norms of the choices", SCORING, t.sent * 4)
        yield Kept("C of the choices", SCORING, t.sent * r * a)
        return
    yield Kept("scores.norms", SCORING, t.routed * n * 4)
    if scoring.all_norms_learn and not scoring.recomputes_scores:
        yield Kept("C of all experts", SCORING, t.routed * n * r * a)
    if not scoring.passes_on_c:  # the rule chooses after the operator
        places = t.routed if scoring.all_norms_learn else t.slots
        yield Kept("places of the choices", SCORING, places * 8)
    elif alone or (scoring.sends_c and not scoring.all_norms_learn):
        yield Kept("C of the choices", SCORING, t.sent * r * a)


def _neurons(
    shape: Shape, t: TokenCounts, experts: PlannedExperts, neurons: Neurons
) -> Iterator[Kept]:
    d, a, n = shape.hidden, shape.value, experts.number
    width = n * neurons.each
    yield Kept("scores.x", SCORING, t.between * d * a, of_norm=True)
    yield Kept("[W_g | W_p] of the routing neurons, in order", SCORING, 2 * d * width * a)
    yield Kept("x [W_g | W_p] of the routing neurons", SCORING, t.routed * 2 * width * a)
    yield Kept("u of the routing neurons", SCORING, t.routed * width * a)
    if neurons.copied:
        yield Kept("what the norms are of, fp32", SCORING, t.routed * width * 4)
    yield Kept("norms", SCORING, t.routed * n * 4)
    if neurons.gated:
        yield Kept("probs of the routing neurons", SCORING, t.routed * n * a)
        yield Kept("u by the probs", SCORING, t.routed * width * a)


def _selection(
    t: TokenCounts, experts: PlannedExperts, layout: Layout, alone: bool
) -> Iterator[Kept]:
    """What the rule and its losses keep, and the rows of the choices."""
    kept, norms = dict.fromkeys(experts.routing.kept), experts.norms
    if alone:  # the experts keep the probs
        kept[PROBS] = None
    if experts.scoring is not None and experts.free is None:
        kept.pop(SCORES, None)  # they are the norms
    if alone and norms is not None and norms.joins_norms:
        kept.pop(CHOSEN, None)
    for each in kept:
        size = each.nbytes(t.routed, t.slots, experts.scores, layout.micro_batch)
        yield Kept(each.name, SCORING, size)
    # A choice has a row for each shard of its expert.
    yield Kept("row map: slots of rows", DISPATCH, t.sent * layout.etp * 8)
    yield Kept("row map: rows of slots", DISPATCH, t.slots * layout.etp * 8)


def _free(shape: Shape, t: TokenCounts, free: Free) -> Iterator[Kept]:
    """What free experts keep besides x, with which their probs are multiplied."""
    yield Kept("free experts of the choices", SCORING, t.slots * 8)
    yield Kept("shares of x", SCORING, t.routed * 4)
    if not free.constants:
        return
    a, numbers = shape.value, t.routed * free.constants
    yield Kept("probs of the free experts", SCORING, t.routed * (1 + free.number) * 4)
    yield Kept("softmax of the constant experts", SCORING, 2 * numbers * 4)
    # In fp32 the weights of x are the other half of the tensor.
    yield Kept("weights of the constants", SCORING, numbers * (a if shape.bf16 else 2 * a))


def _coupling(shape: Shape, layout: Layout, experts: PlannedExperts) -> Iterator[Kept]:
    """Of --moe-erc-loss-coeff: a loss on weights, whatever the tokens."""
    n, d, a = experts.number, shape.hidden, shape.value
    local, width = n // layout.ep, experts.width // layout.etp
    yield Kept("noise of the router", SCORING, n * d * 4)
    yield Kept("rows of the router with noise", SCORING, n * d * a)
    yield Kept("W_g, transposed", SCORING, local * d * width * a)
    yield Kept("rows of the router by W_g", SCORING, local * n * width * 4)
    yield Kept("norms of the rows by W_g", SCORING, local * n * 4)
    for name in ("squares that are not 0", "norms that are not 0", "an expert's own row"):
        yield Kept(name, SCORING, local * n)
    for name in ("norms above those of their row", "norms above those of their column"):
        yield Kept(name, SCORING, local * n * 4)
