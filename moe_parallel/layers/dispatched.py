"""Layers that dispatch tokens to experts. A subclass defines the selection and the experts.

    tokens -> choose -> capacity -> dispatch -> experts -> combine

Shape suffixes: S sequence, B batch (Megatron's order), T tokens of this rank (S * B divided by the
number of tensor- and context-parallel ranks), K choices per token, E all experts, D model width, M
tokens that this rank's experts receive.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.balancing.bias import build_bias
from moe_parallel.balancing.load import StepLoad
from moe_parallel.config import DispatchedSelection
from moe_parallel.dispatch import Dispatched, build_dispatcher
from moe_parallel.experts.shared import OverlappedSharedExpert, SharedExpert
from moe_parallel.layers.expert_layer import ExpertLayer, LayerContext
from moe_parallel.layers.past import RememberedSegments
from moe_parallel.layers.routing_losses import RoutingLoss
from moe_parallel.layers.split_tokens import SplitTokens
from moe_parallel.layers.system import Rules, System
from moe_parallel.selection.choices import BiasedRule, Choices, Rule
from moe_parallel.selection.segments import BySegment
from moe_parallel.selection.tokens import Tokens


class DispatchedLayer(ExpertLayer):
    """Tokens are dispatched to their chosen experts, and the outputs are returned and combined.

    Inside the layer, the tokens of a micro-batch are split over the tensor-parallel ranks.
    If sequence parallelism is on, they arrive split; if not, this layer splits them. Capacity is
    therefore computed from the S * B / tp tokens that one rank routes, or would route without
    context parallelism. In evaluation and generation without sequence parallelism, tp need not
    divide S: every rank then routes all tokens.
    """

    rule: Rule
    evaluation_rule: Rule

    def __init__(
        self,
        config: TransformerConfig,
        selection: DispatchedSelection,
        context: LayerContext,
        system: System,
    ) -> None:
        super().__init__(config, context)
        self.dispatcher = build_dispatcher(
            self.num_experts, context.groups, context.ops, context.progress, selection.sends_c
        )
        self.bias = build_bias(selection, self.num_experts)
        rules = system.rules(selection)
        if context.forcing is not None:
            rules = Rules(*map(context.forcing.of, rules))
        self.rule, self.evaluation_rule = rules
        self.load = StepLoad(self.num_experts) if selection.uses_step_load else None
        losses = [make(selection, self.load, context.num_moe_layers) for make in system.losses]
        self.losses: list[RoutingLoss] = [loss for loss in losses if loss.coefficient]
        self.shared = _shared_expert(config, selection, context)

    @abstractmethod
    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        """Selects the experts of each token."""

    @abstractmethod
    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        """The sum of probs * output over each token's experts on this rank: [M, D]."""

    def output(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        if self.shared is None:
            return self._compute_split(hidden_SBD)
        shared_SBD = self.shared.begin(hidden_SBD)
        y_SBD = self._compute_split(hidden_SBD)
        return y_SBD + self.shared.finish(shared_SBD)

    def _compute_split(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        """The output of the chosen experts: [S, B, D]. Splits the tokens if they are not split."""
        groups, tp = self.context.groups, self.context.groups.tp
        place = {"layer": self.layer_number, "iteration": self.context.iteration()}
        split_here = tp.size() > 1 and not self.config.sequence_parallel
        if split_here and (self.past is not None or len(hidden_SBD) % tp.size()):
            tokens = SplitTokens(hidden_SBD.shape[1], groups.cp, cp_size=groups.cp.size(), **place)
            return self._compute_tokens(hidden_SBD.flatten(0, 1), tokens).view_as(hidden_SBD)
        if split_here:
            hidden_SBD = scatter_to_sequence_parallel_region(hidden_SBD, group=tp)
        tokens = SplitTokens(hidden_SBD.shape[1], groups.tp_cp, cp_size=groups.cp.size(), **place)
        y_SBD = self._compute_tokens(hidden_SBD.flatten(0, 1), tokens).view_as(hidden_SBD)
        if split_here:
            y_SBD = gather_from_sequence_parallel_region(
                y_SBD, tensor_parallel_output_grad=False, group=tp
            )
        return y_SBD

    def _compute_tokens(self, x_TD: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        choices = self.choose(x_TD, tokens)
        if self.routes:
            x_TD = self._with_losses(x_TD, choices, tokens)
            if self.load is not None:
                self.load.count(choices)
            if self.bias is not None and self.bias.observes:
                ranked_TE = cast(BiasedRule, self.rule).ranked(choices.scores_TE)
                self.bias.observe(ranked_TE, choices.experts_TK.shape[1], tokens)
        kept, pad_rows_per_expert = self._limit(choices, tokens)
        self._record(choices, kept)
        rows = self.dispatcher.dispatch(x_TD, kept, pad_rows_per_expert)
        self.statistics.record_wire(rows.wire_bytes)
        if self.routes:
            self.context.progress.rows += len(rows.x_MD)
        return self.dispatcher.combine(self.compute(rows), rows.route)

    def _with_losses(self, x_TD: torch.Tensor, choices: Choices, tokens: Tokens) -> torch.Tensor:
        """Adds the auxiliary losses. Returns `x_TD`, whose backward pass may start theirs."""
        if not self.losses:
            return x_TD
        values = {each.name: each.of(choices, tokens) for each in self.losses}
        self.statistics.record_losses({name: value.detach() for name, value in values.items()})
        weighted = [each.coefficient * values[each.name] for each in self.losses]
        return self.context.add_loss(x_TD, torch.stack(weighted).sum())

    def current_rule(self) -> Rule:
        """The rule of this forward pass; evaluation may use a different rule."""
        rule = self.rule if self.training else self.evaluation_rule
        if self.past is not None and isinstance(rule, BySegment):
            return RememberedSegments(rule, self.past, self.layer_number)
        if self.bias is None:
            return rule
        # Read on each call, because moving the module to a GPU replaces the tensor.
        return cast(BiasedRule, rule).with_bias(self.bias.bias_E)

    def _limit(self, choices: Choices, tokens: Tokens) -> tuple[Choices, int | None]:
        """The choices within capacity, and the number of rows to which each expert is padded."""
        capacity = self.context.capacity
        if capacity is None:
            return choices, None
        rows = None
        if capacity.pad:
            counted = len(choices.scores_TE) * tokens.num_shares // tokens.num_stretches
            rows = capacity.rows_per_expert(counted, self.num_experts)
        return capacity.keep(choices, tokens), rows

    def _record(self, choices: Choices, kept: Choices) -> None:
        dropped = (choices.experts_TK >= 0).sum() - (kept.experts_TK >= 0).sum()
        self.statistics.record(
            tokens_per_expert_E=choices.tokens_per_expert(),
            dropped=dropped,
            scores_TE=choices.scores_TE.detach(),
            norms_TE=self.norms(choices),
        )

    def norms(self, choices: Choices) -> torch.Tensor | None:
        """The norms to log. Returns None if the scores are not norms."""
        return None

    def after_step(self) -> None:
        self.balance(self.context.groups.tp_dp_cp)

    def balance(self, group: dist.ProcessGroup) -> None:
        """Completes the step's loads and updates the balancing bias. Collective over `group`."""
        if self.load is None:
            return
        counts_E = self.load.finish(group)
        if self.bias is not None:
            self.bias.update(counts_E, group)


def _shared_expert(
    config: TransformerConfig, selection: DispatchedSelection, context: LayerContext
) -> SharedExpert | None:
    width = selection.moe_shared_expert_intermediate_size
    if width is None:
        return None
    overlaps = selection.moe_shared_expert_overlap and torch.cuda.is_available()
    kind = OverlappedSharedExpert if overlaps else SharedExpert
    weighed, recomputes = selection.moe_shared_expert_gate, context.recomputes_shared
    return kind(config, width, weighed, context.groups, context.ops, recomputes)
