"""The experts of a layer, as a plan sees them: their sizes, scores and selection."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moe_parallel.config import Config
from moe_parallel.config.selection import LayerWeights, Selection, SharedExpertSize
from moe_parallel.config.selection.kept import (
    EXPERTS,
    LOAD,
    LOSS,
    PROBABILITIES,
    PROBS,
    SCORES,
    KeptTensor,
    OwnWeight,
    PlannedScores,
    Scoring,
)


@dataclass(frozen=True)
class LayerWeight:
    """A weight of a layer of experts, and the ranks that divide it."""

    name: str
    size: int  # in numbers, over all ranks
    divided_by: str  # "none", "tp", or "experts": by ep and etp
    in_fp32: bool = False  # used in fp32


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
    state: int = 0  # bytes of numbers that are not weights
    reads_token_ids: bool = False
    coupled: bool = False  # --moe-erc-loss-coeff


@dataclass(frozen=True)
class PlannedExperts:
    """The experts of a layer."""

    number: int  # n
    per_token: float  # K, or the mean number of experts of a token
    width: int  # f of a SwiGLU expert, d_wide of AoE; of UoE, without the routing neurons
    weights: tuple[LayerWeight, ...]  # in the order in which the layer registers them
    scoring: PlannedScores | None = None  # None: a linear router
    routing: PlannedRouting = PlannedRouting()
    rank: int | None = None  # of W_g = W_down W_up in experts with a router; None: it is whole
    router_hidden: int | None = None  # inner width of a router of two layers; None: one layer
    shared: SharedExpertSize | None = None
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
    free = None
    if selection.free_experts:
        free = Free(selection.free_experts, selection.free_kinds.constant)
    return PlannedExperts(
        number=n,
        per_token=mean or 1,
        width=selection.dispatched_width(config.expert_width, n),
        weights=_weights(selection, d, n, config.expert_width),
        scoring=selection.planned_scores(config),
        routing=_routing(selection, n, vocabulary),
        rank=getattr(selection, "moe_gate_low_rank_size", None),
        router_hidden=getattr(selection, "moe_router_hidden_size", None),
        shared=selection.shared_expert,
        free=free,
    )


def _routing(selection: Selection, n: int, vocabulary: int) -> PlannedRouting:
    kept = [*(selection.kept_by_rule() or []), *selection.kept_by_losses()]
    return PlannedRouting(
        kept=tuple(dict.fromkeys(kept)),
        slots=selection.choices_per_token or n + selection.free_experts,
        experts_take=selection.experts_take,
        gathers_scores=selection.gathers_scores,
        step_sums=tuple(selection.step_sums(n)),
        state=selection.state_bytes(n, vocabulary),
        reads_token_ids=selection.reads_token_ids,
        coupled=bool(getattr(selection, "moe_erc_loss_coeff", 0)),
    )


def _weights(selection: Selection, d: int, n: int, f: int) -> tuple[LayerWeight, ...]:
    """Of a layer of experts: its own, those of the shared expert, those of the experts."""
    if selection.merges:
        return _sums(selection.layer_weights(d, n, f))
    of_shared: list[LayerWeight] = []
    shared = selection.shared_expert
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
