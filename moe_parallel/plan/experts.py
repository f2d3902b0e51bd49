"""The experts of a layer, as a plan sees them: their sizes, scores and selection."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moe_parallel.config import AutonomousSelection, Config, FreeExperts, UoESelection
from moe_parallel.config.selection import LayerWeights, Selection
from moe_parallel.config.selection.kept import (
    EXPERTS,
    LOAD,
    LOSS,
    PROBABILITIES,
    PROBS,
    SCORES,
    KeptTensor,
    OwnWeight,
)


@dataclass(frozen=True)
class LayerWeight:
    """A weight of a layer of experts, and the ranks that divide it."""

    name: str
    size: int  # in numbers, over all ranks
    divided_by: str  # "none", "tp", or "experts": by ep and etp
    in_fp32: bool = False  # used in fp32


@dataclass(frozen=True)
class Scoring:
    """AoE's scores: the norms of C = x W_down of all n experts."""

    rank: int  # d_low
    gathers_w_down: bool = False
    sends_c: bool = False
    recomputes_scores: bool = True
    recomputes_gate: bool = True
    all_norms_learn: bool = True  # --aoe-gradient full
    joins_norms: bool = False  # experts on the token's rank differentiate the norms
    hands_on_c: bool = True  # C of the choices is not computed again on the token's rank


@dataclass(frozen=True)
class Neurons:
    """UoE's scores: the norms of the routing neurons of all n experts."""

    each: int  # of an expert
    gated: bool = False  # their outputs are multiplied by the probs
    copied: bool = True  # the norms are of a tensor in fp32 that exists for them alone


@dataclass(frozen=True)
class PlannedSharedExpert:
    """A dense SwiGLU layer that computes every token beside its experts."""

    width: int
    gate: bool = False  # its output is multiplied by sigmoid(x w)


@dataclass(frozen=True)
class Free:
    """Free experts: choices that no expert computes."""

    number: int
    constants: int  # of these, those with a learned vector


@dataclass(frozen=True)
class PlannedRouting:
    """What the rule of selection and its losses keep and send. The default is top-K's."""

    kept: tuple[KeptTensor, ...] = (SCORES, EXPERTS, PROBS, PROBABILITIES, LOAD, LOSS)
    slots: int | None = None  # of a token; None: K
    experts_take: float | None = None  # the tokens that experts choose, as a multiple of all / n
    gathers_scores: bool = False  # of the whole micro-batch
    step_sums: tuple[int, ...] = ()  # bytes of the sums over the ranks of a stage after a step
    state: int = 0  # bytes of numbers that are no weights
    reads_token_ids: bool = False
    coupled: bool = False  # --moe-erc-loss-coeff


@dataclass(frozen=True)
class PlannedExperts:
    """The experts of a layer."""

    number: int  # n
    per_token: float  # K, or the mean number of experts of a token
    width: int  # f of a SwiGLU expert, d_wide of AoE; of UoE, without the routing neurons
    weights: tuple[LayerWeight, ...]  # in the order in which the layer registers them
    scoring: Scoring | Neurons | None = None  # None: a linear router
    routing: PlannedRouting = PlannedRouting()
    rank: int | None = None  # of W_g = W_down W_up in experts with a router; None: it is whole
    router_hidden: int | None = None  # inner width of a router of two layers; None: one layer
    shared: PlannedSharedExpert | None = None
    free: Free | None = None

    @property
    def scores(self) -> int:
        """The scores of a token: of the experts, then of the free experts."""
        return self.number + (0 if self.free is None else self.free.number)

    @property
    def slots(self) -> int:
        """The slots of a token in the tables of choices."""
        return round(self.per_token) if self.routing.slots is None else self.routing.slots

    @property
    def norms(self) -> Scoring | None:
        """AoE's scores; None: another system's."""
        return self.scoring if isinstance(self.scoring, Scoring) else None

    @property
    def low_rank(self) -> int | None:
        """The low-rank size of the experts; None: SwiGLU experts."""
        return self.rank if self.norms is None else self.norms.rank

    @property
    def replicated(self) -> list[LayerWeight]:
        """The weights of the layer itself that every rank of the stage holds."""
        return [each for each in self.weights if each.divided_by == "none"]

    def rows(self, tokens: int) -> int:
        """The choices of tokens, one after rounding where experts choose."""
        take = self.routing.experts_take
        if take is None:
            return round(tokens * self.per_token)
        each = math.floor(take * tokens / self.number + 0.5)
        return self.number * min(tokens, max(1, each))


def experts_of(config: Config, vocabulary: int, mean_choices: float | None) -> PlannedExperts:
    """The experts of a configuration.

    `mean_choices`: the mean number of experts of a token, if the configuration says none or a
    target only.
    """
    selection, n, d = config.selection, config.num_experts, config.model.hidden_size
    target = selection.target_choices(n)
    fixed = selection.mean_choices if target is None else None
    mean = fixed or mean_choices or (None if target is None else target.mean)
    width = getattr(selection, "moe_shared_expert_intermediate_size", None)
    shared = None
    if width is not None:
        shared = PlannedSharedExpert(width, getattr(selection, "moe_shared_expert_gate", False))
    free = None
    if isinstance(selection, FreeExperts) and selection.free_experts:
        free = Free(selection.free_experts, selection.moe_constant_experts)
    return PlannedExperts(
        number=n,
        per_token=mean or 1,
        width=selection.dispatched_width(config.expert_width, n),
        weights=_weights(selection, d, n, config.expert_width, shared),
        scoring=_scoring(config),
        routing=_routing(selection, n, vocabulary),
        rank=getattr(selection, "moe_gate_low_rank_size", None),
        router_hidden=getattr(selection, "moe_router_hidden_size", None),
        shared=shared,
        free=free,
    )


def _scoring(config: Config) -> Scoring | Neurons | None:
    selection = config.selection
    if isinstance(selection, UoESelection):
        return Neurons(
            selection.routing_neurons(config.expert_width, config.num_experts),
            selection.uoe_gate_routing,
            copied=config.training.bf16 or selection.uoe_norm_of == "silu",
        )
    if not isinstance(selection, AutonomousSelection):
        return None
    # Only the K greatest norms are chosen where they are computed, and C with them.
    greatest = selection.choices_per_token is not None and not selection.free_experts
    selected = selection.aoe_gradient == "selected"
    return Scoring(
        selection.aoe_low_rank_size,
        selection.aoe_gather_w_down,
        selection.aoe_send_activations and greatest,
        selection.aoe_recompute_scores,
        selection.aoe_recompute_gate,
        selection.aoe_gradient == "full",
        joins_norms=selected and greatest and config.fp8.fp8_format is None,
        hands_on_c=greatest,
    )


def _routing(selection: Selection, n: int, vocabulary: int) -> PlannedRouting:
    kept = [*(selection.kept_by_rule() or []), *selection.kept_by_losses()]
    return PlannedRouting(
        kept=tuple(dict.fromkeys(kept)),
        slots=selection.choices_per_token or n + selection.free_experts,
        experts_take=getattr(selection, "moe_expert_choice_capacity_factor", None),
        gathers_scores=selection.gathers_scores,
        step_sums=tuple(selection.step_sums(n)),
        state=selection.state_bytes(n, vocabulary),
        reads_token_ids=selection.reads_token_ids,
        coupled=bool(getattr(selection, "moe_erc_loss_coeff", 0)),
    )


def _weights(
    selection: Selection, d: int, n: int, f: int, shared: PlannedSharedExpert | None
) -> tuple[LayerWeight, ...]:
    """Of a layer of experts: its own, those of the shared expert, those of the experts."""
    if selection.merges:
        return _sums(selection.layer_weights(d, n, f))
    of_shared: list[LayerWeight] = []
    if shared is not None:
        if shared.gate:
            of_shared.append(LayerWeight("w_shared_gate", d, "none"))
        of_shared.append(LayerWeight("shared_fc1", 2 * shared.width * d, "tp"))
        of_shared.append(LayerWeight("shared_fc2", shared.width * d, "tp"))
    width = selection.dispatched_width(f, n)
    ranks = [rank for _, rank in selection.low_rank_sizes]
    of_experts = aoe_weights(d, n, ranks[0], width, "") if ranks else swiglu_weights(d, n, width)
    return (*_own(selection.own_weights(d, n, f)), *of_shared, *of_experts[1:])


def _own(weights: Iterable[OwnWeight]) -> list[LayerWeight]:
    return [
        LayerWeight(each.name, each.size, "experts" if each.gathered else "none", each.in_fp32)
        for each in weights
    ]


def _sums(sizes: LayerWeights) -> tuple[LayerWeight, ...]:
    """The weights of a layer that merges its experts, by the ranks that divide them."""
    names = (("replicated", "none"), ("dense", "tp"), ("experts", "experts"))
    return tuple(LayerWeight(name, size, by) for (name, by), size in zip(names, sizes, strict=True))


def swiglu_weights(d: int, n: int, f: int) -> tuple[LayerWeight, ...]:
    """Of a routed layer."""
    return (
        LayerWeight("w_router", n * d, "none", in_fp32=True),
        LayerWeight("w_gate_up", n * d * 2 * f, "experts"),
        LayerWeight("w_out", n * f * d, "experts"),
    )


def aoe_weights(d: int, n: int, r: int, w: int, held_by: str) -> tuple[LayerWeight, ...]:
    """Of an autonomous layer with d_low = r and d_wide = w."""
    return (
        LayerWeight("w_down", n * d * r, held_by),
        LayerWeight("w_up", n * r * w, "experts"),
        LayerWeight("w_p", n * d * w, "experts"),
        LayerWeight("w_out", n * w * d, "experts"),
    )
