"""The autonomous family: experts rank themselves by the norm of their own activations (AoE).

The weight with which they score tokens (W_down) is replicated, or gathered for each use.

Shape suffixes: T tokens of this rank, E all experts, L experts of this rank, D model width, R
low-rank size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from moe_parallel.config import AutonomousSelection
from moe_parallel.dispatch import Dispatched, LocalDispatcher
from moe_parallel.experts.experts import (
    LowRankExperts,
    ShardedStateDict,
    mark_expert_weight,
    shard_of_experts,
)
from moe_parallel.experts.fp8 import low_rank_experts
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import ExpertLayer, LayerConfig, LayerContext
from moe_parallel.layers.system import System
from moe_parallel.ops.types import Choose, Gradient, Keep
from moe_parallel.parallel import gather_over
from moe_parallel.selection.choices import Choices, Rule
from moe_parallel.selection.forced import Replayed
from moe_parallel.selection.rules import softmax_of_selected
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.telemetry.progress import Phase


class AutonomousLayer(DispatchedLayer):
    """Autonomy-of-Experts (AoE paper, Algorithm 2), with any rule on the norms.

    C_i = x W_down^i for all E experts, and p_i = ||C_i||_2. With top-K, the K experts with the
    largest p compute, and the softmax over their p weights their outputs. There is no router.
    Each token needs all norms before it is dispatched, so every rank needs W_down of every expert.
    A rank holds these weights or gathers them (scoring_weight.py). The gradient has two parts:
    from the norms on the token's rank, and from the computation on the expert's rank.

    With `--aoe-gradient selected` the first part includes only the chosen norms. If the probs are
    the softmax over these norms and there is no auxiliary loss, then the other norms have no
    gradient, and nothing is lost. The backward pass of their E - K products with x is saved. If the
    chosen experts are on the token's rank, their norms are differentiated together with them.

    A free expert has no C. Its score is a learned number, a threshold that norms must exceed.
    """

    scores_are_norms = True
    w_down_EDR: torch.Tensor
    w_free_Z: torch.Tensor  # if there are free experts
    experts: LowRankExperts

    def __init__(
        self,
        config: LayerConfig,
        selection: AutonomousSelection,
        expert_width: int,
        context: LayerContext,
        system: System,
        **_: Any,  # what later versions of Megatron-Core add
    ) -> None:
        super().__init__(config, selection, context, system)
        self.recompute_scores = selection.aoe_recompute_scores
        self.gradient: Gradient = "all" if selection.aoe_gradient == "full" else "chosen"
        if selection.aoe_gradient == "selected":
            for loss in self.losses:
                if loss.through_all:
                    selection.refuse_selected_gradient(loss.name)
        may_join = selection.may_join_norms(
            fp8=context.fp8 is not None, capacity=context.capacity is not None
        )
        # A loss needs norms with a gradient of their own.
        self.joins_norms = may_join and self.dispatcher.passes_c and not self.losses
        rank = selection.aoe_low_rank_size
        if self.free is not None:
            self.add_replicated_weight("w_free_Z", self.free.number)
            # The norm of C at the start, for x of RMS 1: then the score of a free expert is near.
            self._free_unit = config.init_method_std * math.sqrt(config.hidden_size * rank)
        self.w_down = scoring_weight(
            self, selection.aoe_gather_w_down, "w_down_EDR", config.hidden_size, rank
        )
        self.experts = low_rank_experts(context.fp8)(
            self.num_experts,
            config.hidden_size,
            rank,
            expert_width,
            context.groups,
            context.ops,
            config.params_dtype,
            selection.aoe_recompute_gate,
            selection.up_std,
        )

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        rule = self.current_rule()
        with self.w_down.whole() as w_down_EDR:
            # A rule derived from TopK may choose otherwise, so the operator must not choose for it.
            if type(rule) is TopK and self.free is None:
                return self._choose_greatest(x_TD, w_down_EDR, rule)
            if isinstance(rule, Replayed) and type(rule.rule) is TopK and self.free is None:
                chosen = partial(rule.chosen, tokens=tokens)
                return self._choose_greatest(x_TD, w_down_EDR, rule.rule, chosen)
            return self._choose_by(rule, x_TD, w_down_EDR, tokens)

    def _choose_greatest(
        self,
        x_TD: torch.Tensor,
        w_down_EDR: torch.Tensor,
        rule: TopK,
        chosen: Choose | None = None,
    ) -> Choices:
        """Top-K by the operator `norm_topk`, which can also return C of the chosen experts.

        `chosen`: K other experts of each token, from the norms. None: those with the greatest.
        """
        assert rule.ranking is None and rule.groups is None
        passes_c = self.dispatcher.passes_c
        keep: Keep = "chosen" if passes_c else "nothing"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.joins_norms):
            scores = self.context.ops.norm_topk(
                x_TD,
                w_down_EDR,
                rule.k if chosen is None else None,
                rule.bias_E if chosen is None else None,
                keep=keep if self.recompute_scores else "all",
                gradient=self.gradient,
                chosen=chosen,
            )
            choices = rule.of(scores.norms_TE, scores.experts_TK)
        norms_TK = None
        if self.joins_norms:
            assert rule.probs is softmax_of_selected
            norms_TK = scores.norms_TE.gather(1, scores.experts_TK)
        return replace(choices, c_TKR=scores.c_TKR if passes_c else None, norms_TK=norms_TK)

    def _choose_by(
        self, rule: Rule, x_TD: torch.Tensor, w_down_EDR: torch.Tensor, tokens: Tokens
    ) -> Choices:
        """Any other rule. C is not passed on, because a token may have as many slots as experts."""

        def chosen(norms_TE: torch.Tensor) -> torch.Tensor:
            experts_TK = rule(self._with_free_scores(norms_TE), tokens).experts_TK
            return experts_TK.masked_fill(experts_TK >= self.num_experts, -1)

        norm_topk = self.context.ops.norm_topk
        if self.gradient == "all":  # the gradient does not depend on the choice
            keep: Keep = "nothing" if self.recompute_scores else "all"
            scores = norm_topk(x_TD, w_down_EDR, 1, keep=keep)
        else:
            rows, budget = None, self.row_budget
            if budget is not None and budget.rows is not None:
                # A capacity drops some of these choices before they are counted, and the rows of
                # other dispatchers are not those of this rank's tokens.
                is_counted = (
                    budget.counts_rows
                    and self.context.capacity is None
                    and isinstance(self.dispatcher, LocalDispatcher)
                )
                rows = budget.rows if is_counted else len(x_TD) * self.num_experts
            scores = norm_topk(
                x_TD, w_down_EDR, None, gradient="chosen", chosen=chosen, max_rows=rows
            )
        return rule(self._with_free_scores(scores.norms_TE), tokens)

    def _with_free_scores(self, norms_TE: torch.Tensor) -> torch.Tensor:
        """The norms, then the scores of the free experts: learned numbers, equal for all tokens."""
        if self.free is None:
            return norms_TE
        score_Z = self._free_unit * self.replicated(self.w_free_Z).to(norms_TE.dtype)
        return torch.cat([norms_TE, score_Z.expand(len(norms_TE), -1)], dim=1)

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        with self.w_down.local() as w_down_LDR:
            return self.experts(
                rows.x_MD, rows.probs_MJ, rows.row_map, w_down_LDR, rows.c_MJR, rows.norms_MJ
            )

    def compute_parts(self, rows: Iterator[Dispatched[Any]], parts: int) -> Iterator[torch.Tensor]:
        with self.w_down.local() as w_down_LDR:  # gathered once for all parts
            yield from self.experts.outputs_of_parts(rows, w_down_LDR, parts)

    def scoring_weights(self) -> Iterable[torch.Tensor]:
        return [self.w_down_EDR]

    @property
    def wire_bytes_of_scores(self) -> int:
        return self.w_down.wire_bytes

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """W_down has the same name and global shape whether it is replicated or gathered."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | self.w_down.sharded(prefix, sharded_offsets)


ShardedOffsets = tuple[tuple[int, int, int], ...]


class ScoringWeight(Protocol):
    """A parameter with one matrix per expert, which every token uses before it is dispatched."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends in a forward pass that uses both `whole` and `local`."""

    def whole(self) -> AbstractContextManager[torch.Tensor]:
        """The weight of all experts, [E, ...], for use inside the `with` block.

        If the block saves it for the backward pass, this class controls what is kept.
        """

    def local(self) -> AbstractContextManager[torch.Tensor]:
        """The weight of this rank's experts, [L, ...], for use inside the `with` block."""

    def sharded(self, prefix: str, sharded_offsets: ShardedOffsets) -> ShardedStateDict:
        """The entry in a sharded state dict; empty if the default entry is right."""


class ReplicatedWeight:
    """Every rank of a stage holds the weight of every expert, as it holds the router's weight."""

    wire_bytes = 0

    def __init__(self, layer: ExpertLayer, name: str, *shape: int) -> None:
        layer.add_replicated_weight(name, layer.num_experts, *shape)
        self._layer, self._name = layer, name

    def whole(self) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(self._layer.replicated(getattr(self._layer, self._name)))

    def local(self) -> AbstractContextManager[torch.Tensor]:
        whole = self._layer.replicated(getattr(self._layer, self._name))
        return nullcontext(self._layer.experts.local(whole))

    def sharded(self, prefix: str, sharded_offsets: ShardedOffsets) -> ShardedStateDict:
        return {}


class GatheredWeight:
    """Each rank holds the weight of its own experts, with axis 1 split over etp.

    A rank gathers the rest. This is an expert weight: its gradient is reduced over edp, and its
    optimizer state is divided in the same way as the weight. Gathering over etp gives the complete
    weight of this rank's experts, and gathering that over ep gives the weight of all experts. The
    result is not kept for the backward pass, which gathers again. If the layer is recomputed, it is
    kept, because the backward pass then repeats the forward pass and uses it at once.
    """

    SHARDED_AXIS = 1

    def __init__(self, layer: ExpertLayer, name: str, *shape: int) -> None:
        groups = layer.context.groups
        parts = groups.etp.size()
        assert shape[0] % parts == 0, (name, shape, parts)
        here = (layer.num_experts // groups.ep.size(), shape[0] // parts, *shape[1:])
        weight = nn.Parameter(torch.empty(here, dtype=layer.config.params_dtype))
        mark_expert_weight(weight, groups, self.SHARDED_AXIS)
        layer.register_parameter(name, weight)
        self._layer, self._name, self._groups = layer, name, groups
        full = layer.config.recompute_granularity == "full"
        self._keeps = full or layer.context.recomputes_layers

    @property
    def wire_bytes(self) -> int:
        """`local` and `whole` each send over etp; `whole` also sends over ep."""
        etp, ep = self._groups.etp.size(), self._groups.ep.size()
        part = self._weight.numel() * self._weight.element_size()
        return 2 * part * (etp - 1) + part * etp * (ep - 1)

    def whole(self) -> AbstractContextManager[torch.Tensor]:
        return self._saved_as_parts(self._gather_all)

    def local(self) -> AbstractContextManager[torch.Tensor]:
        return self._saved_as_parts(self._gather_local)

    def sharded(self, prefix: str, sharded_offsets: ShardedOffsets) -> ShardedStateDict:
        key = prefix + self._name
        shard = shard_of_experts(
            key, self._weight, self.SHARDED_AXIS, self._groups, sharded_offsets
        )
        return {key: shard}

    @property
    def _weight(self) -> torch.Tensor:
        return getattr(self._layer, self._name)

    def _gather_local(self) -> torch.Tensor:
        return self._gather(self._weight, self.SHARDED_AXIS, self._groups.etp)

    def _gather_all(self) -> torch.Tensor:
        return self._gather(self._gather_local(), 0, self._groups.ep)

    def _gather(self, part: torch.Tensor, axis: int, group: ProcessGroup) -> torch.Tensor:
        progress = self._layer.context.progress
        with progress.during(Phase.DISPATCH):
            gathered = gather_over(part, axis, group)
        if gathered is not part:
            progress.during_backward(Phase.DISPATCH, gathered)
        return gathered

    @contextmanager
    def _saved_as_parts(self, gather: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
        """The result of `gather`. If the block saves it or a view of it, only the view's shape,
        strides and offset are kept, and the backward pass gathers again.
        """
        gathered = gather()
        storage = gathered.untyped_storage()._cdata  # fake tensors, of plans, have no address
        if self._keeps or gathered is self._weight:
            yield gathered
            return

        def pack(saved: torch.Tensor) -> Any:
            if saved.untyped_storage()._cdata != storage:
                return saved
            return saved.shape, saved.stride(), saved.storage_offset()

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            with torch.no_grad():
                return gather().as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            yield gathered


def scoring_weight(layer: ExpertLayer, gathered: bool, name: str, *shape: int) -> ScoringWeight:
    """Register the parameter `name` [E, *shape] of a layer.

    Args:
        gathered: gather the weight over the ranks that hold the experts, if there are several;
            otherwise every rank holds it completely.
    """
    divided = layer.context.groups.etp_ep.size() > 1
    kind = GatheredWeight if gathered and divided else ReplicatedWeight
    return kind(layer, name, *shape)
