"""Layers that dispatch tokens to experts. A subclass defines the selection and the experts.

    tokens -> choose -> capacity -> dispatch -> experts -> combine

A free expert belongs to no rank: its output is added after the combination.

Shape suffixes: S sequence, B batch (Megatron's order), T tokens of this rank (S * B divided by the
number of tensor- and context-parallel ranks), K slots per token, E all experts, D model width, M
rows that this rank receives (without dispatch: its tokens).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from moe_parallel.balancing.bias import ExpertBias
from moe_parallel.balancing.load import StepLoad
from moe_parallel.balancing.losses import LossContext, RoutingLoss
from moe_parallel.config import Config, DispatchedSelection, FreeExperts, Selection
from moe_parallel.config.training import EXPERTS, SHARED
from moe_parallel.dispatch import AllToAllInParts, Dispatched, RowBudget, build_dispatcher
from moe_parallel.errors import InputError
from moe_parallel.experts.experts import SwiGLUExperts
from moe_parallel.experts.shared import OverlappedSharedExpert, SharedExpert
from moe_parallel.layers.expert_layer import (
    ExpertLayer,
    LayerConfig,
    LayerContext,
    Recipient,
    Statistics,
)
from moe_parallel.layers.free_experts import build_free_experts
from moe_parallel.layers.given_choices import build_forcing
from moe_parallel.layers.system import Rules, System
from moe_parallel.ops import select_backend
from moe_parallel.ops.bounded_experts import within_budget
from moe_parallel.parallel import Groups, gather_over, sum_gradient_over, sum_over
from moe_parallel.selection.capacity import DROP_ORDERS, Capacity
from moe_parallel.selection.choices import BiasedRule, Choices, Rule
from moe_parallel.selection.tokens import Share, Tokens, in_order, part_of, take, zigzag


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
    scores_are_norms: ClassVar[bool] = False  # to log
    hash_table: Any  # the experts of each token id; None: the scores choose
    row_budget: RowBudget | None = None  # None: the host waits for a number of rows that varies

    def __init__(
        self,
        config: LayerConfig,
        selection: DispatchedSelection,
        context: LayerContext,
        system: System,
    ) -> None:
        super().__init__(config, context)
        self.dispatcher = build_dispatcher(
            self.num_experts,
            context.groups,
            context.ops,
            context.progress,
            context.dispatch_parts,
        )
        self.free = build_free_experts(self, selection)
        self.bias = system.bias(selection, config, context.train_iters)
        self._bias_moves = selection.bias_moves
        self.controller = system.controller(selection, self.num_experts, context.train_iters)
        self.hash_table = system.table(context)
        rules = self._rules(system.rules(selection))
        self.rule, self.evaluation_rule = context.trace.rule(rules.training), rules.evaluation
        if self.bias is not None:
            _check_that_it_takes_a_bias(self.evaluation_rule)
        self.load = StepLoad(self.num_scores) if selection.uses_step_load else None
        available = LossContext(context.num_moe_layers, self.load, self.controller, self)
        losses = [make(selection, available) for make in system.losses]
        self.losses: list[RoutingLoss] = [loss for loss in losses if loss.coefficient]
        self.shared = _shared_expert(config, selection, context)
        self._micro_batches = MicroBatches()

    def _rules(self, rules: Rules) -> Rules:
        """The rules with what the layer holds for them."""
        context = self.context
        if self.hash_table is not None:
            rules = Rules(*map(self.hash_table.of, rules))
        if self.controller is not None:
            rules = Rules(*map(self.controller.of, rules))
        if context.forcing is not None:
            rules = Rules(*map(context.forcing.of, rules))
        return rules

    @property
    def num_scores(self) -> int:
        """The number of scores per token: of the experts, then of the free experts."""
        return self.num_experts + (0 if self.free is None else self.free.number)

    @abstractmethod
    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        """Selects the experts of each token."""

    @abstractmethod
    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        """The sum of probs * output over each token's experts on this rank: [M, D].

        A subclass whose experts compute something else overrides `compute_parts`, too.
        """

    def compute_parts(self, rows: Iterator[Dispatched[Any]], parts: int) -> Iterator[torch.Tensor]:
        """The same for one of `parts` parts of the experts after the other.

        It takes the rows of a part only when it is about to compute them, and yields the output at
        once, because other parts travel meanwhile.
        """
        return cast(SwiGLUExperts, self.experts).outputs_of_parts(rows, parts)

    def output(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        if self.shared is None:
            return self._compute_split(hidden_SBD)
        shared_SBD = self.shared.begin(hidden_SBD)
        y_SBD = self._compute_split(hidden_SBD)
        return y_SBD + self.shared.finish(shared_SBD)

    def _compute_split(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        """The output of the chosen experts: [S, B, D]. Splits the tokens if they are not split."""
        groups, tp = self.context.groups, self.context.groups.tp
        split_here = tp.size() > 1 and not self.config.sequence_parallel
        if split_here and len(hidden_SBD) % tp.size():
            tokens = self._tokens(hidden_SBD, groups.cp)
            return self._compute_tokens(hidden_SBD.flatten(0, 1), tokens).view_as(hidden_SBD)
        if split_here:
            from megatron.core.tensor_parallel import mappings

            hidden_SBD = mappings.scatter_to_sequence_parallel_region(hidden_SBD, group=tp)
        tokens = self._tokens(hidden_SBD, groups.tp_cp)
        y_SBD = self._compute_tokens(hidden_SBD.flatten(0, 1), tokens).view_as(hidden_SBD)
        if split_here:
            y_SBD = mappings.gather_from_sequence_parallel_region(
                y_SBD, tensor_parallel_output_grad=False, group=tp
            )
        return y_SBD

    def _tokens(self, hidden_SBD: torch.Tensor, ranks: dist.ProcessGroup) -> SplitTokens:
        """The tokens that this rank routes; `ranks` share their sequences."""
        length, sequences, _ = hidden_SBD.shape
        ids_T = None
        if self.token_ids_BS is not None:
            parts_BS = self.token_ids_BS.split(length, 1)  # one for each tensor-parallel rank
            part = self.context.groups.tp.rank() if len(parts_BS) > 1 else 0
            ids_T = parts_BS[part].t().flatten()
        context, dp = self.context, self.context.groups.dp
        training, with_gradients = self.training, torch.is_grad_enabled()

        def find_place() -> tuple[int, int]:
            iteration = context.iteration()
            counted = self._micro_batches.next(iteration, with_gradients) if training else 0
            return iteration, (counted * dp.size() + dp.rank()) * sequences

        return SplitTokens(
            sequences,
            ranks,
            cp_size=context.groups.cp.size(),
            layer=self.layer_number,
            find_place=find_place,
            seed=context.seed,
            ids_T=ids_T,
        )

    def _compute_tokens(self, x_TD: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        choices = self.choose(x_TD, tokens)
        losses: dict[str, torch.Tensor] = {}
        routes = self.training and torch.is_grad_enabled()  # see `routes`
        if routes:
            if self.losses:
                x_TD, losses = self._with_losses(x_TD, choices, tokens)
            self._observe(choices, tokens)
        kept, pad_rows_per_expert = choices, None
        if self.context.capacity is not None:
            kept, pad_rows_per_expert = self._limit(self.context.capacity, choices, tokens)
        computed, probs_TZ = (kept, None) if self.free is None else self.free.divided(kept)
        budget = self.row_budget if routes else None
        y_TD, wire_bytes, rows = self._compute_dispatched(
            x_TD, computed, pad_rows_per_expert, budget
        )
        if routes and (budget is None or not budget.counts_rows):
            self.context.progress.received(rows)
        totals = self.context.statistics.recipient()
        if totals is not None:
            self._record(totals, choices, kept, losses, wire_bytes + self.wire_bytes_of_scores)
        if self.free is None or probs_TZ is None:
            return y_TD
        return y_TD + self.free.output(x_TD, probs_TZ)

    def _observe(self, choices: Choices, tokens: Tokens) -> None:
        """Shows the choices of a micro-batch to what moves after the step, and to a trace."""
        if self.context.trace.recorder is not None:
            self.context.trace.recorder.add(tokens, choices.experts_TK)
        if self.load is not None:
            self.load.count(choices)
        if self.controller is not None:
            self.controller.count(self.dispatched(choices))
        if self.bias is not None and self.bias.observes and self._moving_bias() is not None:
            ranked_TE = cast(BiasedRule, self.rule).ranked(choices.scores_TE)
            self.bias.observe(ranked_TE, choices.experts_TK.shape[1], tokens)

    @property
    def wire_bytes_of_scores(self) -> int:
        """The bytes that this rank sends to others to score its tokens."""
        return 0

    def dispatched(self, choices: Choices) -> Choices:
        """The choices without those of free experts, whose slots become empty."""
        return choices if self.free is None else self.free.divided(choices)[0]

    def _compute_dispatched(
        self,
        x_TD: torch.Tensor,
        choices: Choices,
        pad_rows_per_expert: int | None,
        budget: RowBudget | None,
    ) -> tuple[torch.Tensor, int, int]:
        """The output of the experts, on whatever ranks they are, [T, D]; the bytes that this rank
        sends to others, and the choices that its experts compute."""
        dispatcher = self.dispatcher
        if isinstance(dispatcher, AllToAllInParts):
            departed = dispatcher.dispatch_parts(x_TD, choices, pad_rows_per_expert)
            outputs = self.compute_parts(departed.parts, dispatcher.parts)
            y_TD = dispatcher.combine_parts(outputs, departed)
            wire_bytes = departed.wire_bytes
            received = sum(route.choices for route in departed.routes_C)
        else:
            rows = dispatcher.dispatch(x_TD, choices, pad_rows_per_expert, budget)
            y_TD = dispatcher.combine(self.compute(rows), rows.route)
            wire_bytes, received = rows.wire_bytes, len(rows.row_map.slots_N)
        if choices.output_TD is not None:
            y_TD = y_TD + choices.output_TD
        return y_TD, wire_bytes, received

    def _with_losses(
        self, x_TD: torch.Tensor, choices: Choices, tokens: Tokens
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Adds the auxiliary losses. Returns `x_TD`, whose backward pass may start theirs, and
        their values without coefficients."""
        values, weighted = {}, []
        for each in self.losses:
            value = each.of(choices, tokens)
            values[each.name] = value.detach()
            weighted.append(each.weighted(value))
        return self.context.add_loss(x_TD, torch.stack(weighted).sum()), values

    def current_rule(self) -> Rule:
        """The rule of this forward pass; evaluation may use a different rule."""
        rule = self.rule if self.training else self.evaluation_rule
        if self.bias is None:
            return rule
        # Read on each call, because moving the module to a GPU replaces the tensor.
        return cast(BiasedRule, rule).with_bias(self.bias.bias_E)

    def _limit(
        self, capacity: Capacity, choices: Choices, tokens: Tokens
    ) -> tuple[Choices, int | None]:
        """The choices within capacity, and the number of rows to which each expert is padded."""
        rows = None
        if capacity.pad:
            counted = len(choices.scores_TE) * tokens.num_shares // tokens.num_stretches
            rows = capacity.rows_per_expert(counted, self.num_experts)
        return capacity.keep(choices, tokens), rows

    def _record(
        self,
        totals: Recipient,
        choices: Choices,
        kept: Choices,
        losses: dict[str, torch.Tensor],
        wire_bytes: int,
    ) -> None:
        """Of the n experts; of the free ones only how many choices they got."""
        dropped: torch.Tensor | int = 0
        if kept is not choices:
            dropped = (choices.experts_TK >= 0).sum() - (kept.experts_TK >= 0).sum()
        counts_E, free_counts_Z = choices.tokens_per_expert().tensor_split([self.num_experts])
        scores_TE = choices.scores_TE.detach()[:, : self.num_experts]
        totals.add(
            self.layer_number,
            counts_E,
            scores_TE,
            dropped=dropped,
            norms_TE=scores_TE if self.scores_are_norms else None,
            cutoff_E=self.cutoffs(),
            free_choices=0 if self.free is None else free_counts_Z.sum(),
            losses=losses,
            wire_bytes=wire_bytes,
        )

    def cutoffs(self) -> torch.Tensor | None:
        """The cutoffs to log, fp32 [E]. Returns None if scores are not compared with any."""
        return None if self.bias is None else self.bias.cutoff_E

    def after_step(self) -> None:
        self.balance(self.context.groups.tp_dp_cp)

    def balance(self, group: dist.ProcessGroup) -> None:
        """Completes the step's loads and updates the balancing bias. Collective over `group`."""
        if self.load is None:
            return
        counts_E = self.load.finish(group)
        bias = self._moving_bias()
        if bias is not None:
            bias.update(counts_E, group)

    def _moving_bias(self) -> ExpertBias | None:
        """The bias or the cutoffs, if they move after this step; the same on every rank."""
        if self.bias is None:
            return None
        moves = self._bias_moves(self.context.iteration(), self.context.train_iters)
        return self.bias if moves else None


def _check_that_it_takes_a_bias(rule: Rule) -> None:
    """Raises InputError for a rule of one's own without `BiasedRule`'s methods."""
    if not hasattr(rule, "with_bias"):
        raise InputError(
            f"{type(rule).__name__} has no method with_bias, so no bias can shift the scores of "
            "its experts: leave out --moe-router-enable-expert-bias, or use another system"
        )


def _shared_expert(
    config: LayerConfig, selection: DispatchedSelection, context: LayerContext
) -> SharedExpert | None:
    width = selection.moe_shared_expert_intermediate_size
    if width is None:
        return None
    overlaps = selection.moe_shared_expert_overlap and torch.cuda.is_available()
    kind = OverlappedSharedExpert if overlaps else SharedExpert
    weighed, recomputes = selection.moe_shared_expert_gate, context.recomputes_shared
    return kind(config, width, weighed, context.groups, context.ops, recomputes)


class MicroBatches:
    """Numbers the micro-batches that a layer meets in a step, from 0.

    It meets them in their order, whatever the schedule of the pipeline. With recomputation it meets
    each twice, first without gradients; the two passes are counted separately.
    """

    def __init__(self) -> None:
        self._iteration = -1
        self._met = {False: 0, True: 0}  # passes without gradients, and with

    def next(self, iteration: int, with_gradients: bool) -> int:
        """The number of the micro-batch that the layer meets now, in training."""
        if iteration != self._iteration:
            self._iteration, self._met = iteration, {False: 0, True: 0}
        self._met[with_gradients] += 1
        return self._met[with_gradients] - 1


@dataclass(frozen=True)
class SplitTokens(Tokens):
    """A share of every sequence. The methods are those of `Tokens` and collective over `ranks`."""

    ranks: dist.ProcessGroup  # tensor- and context-parallel; the number in tp varies fastest
    cp_size: int = field(default=1, kw_only=True)  # context-parallel ranks among them

    @property
    def num_shares(self) -> int:
        return self.ranks.size()

    @property
    def num_stretches(self) -> int:
        return self.ranks.size() // self.cp_size

    def share(self, num_tokens: int) -> Share:
        length = num_tokens // self.num_sequences * self.num_shares
        return self._share_of(self.ranks.rank(), length)

    def of_micro_batch(self, x_TX: torch.Tensor) -> torch.Tensor:
        if self.num_shares == 1:
            return x_TX.detach()
        together = gather_over(x_TX.detach(), 0, self.ranks)
        if self.cp_size == 1:
            return together
        length = len(together) // self.num_sequences
        shares = [self._share_of(rank, length) for rank in range(self.num_shares)]
        return in_order(self._by_position(together), shares).flatten(0, 1)

    def of_this_rank(self, x_AX: torch.Tensor) -> torch.Tensor:
        share = self._share_of(self.ranks.rank(), len(x_AX) // self.num_sequences)
        return take(self._by_position(x_AX), share).flatten(0, 1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.ranks.size() == 1 else sum_over(x, self.ranks)

    def sum_for_each(self, x: torch.Tensor) -> torch.Tensor:
        return sum_gradient_over(sum_over(x, self.ranks), self.ranks)

    def _share_of(self, rank: int, length: int) -> Share:
        of_cp, of_tp = divmod(rank, self.num_stretches)
        return part_of(zigzag(length, self.cp_size, of_cp), self.num_stretches, of_tp)

    def _by_position(self, x: torch.Tensor) -> torch.Tensor:
        """[S * B, ...] -> [S, B, ...]."""
        return x.unflatten(0, (-1, self.num_sequences))


def build_context(
    config: Config, groups: Groups, statistics: Statistics, **others: Any
) -> LayerContext:
    """What the options of a configuration make of a layer's context. `others`: its other fields, or
    those for which the configuration does not count."""
    ops = others.pop("ops", None) or select_backend(config.moe.moe_backend)
    modules = config.training.recomputed_modules
    fields = {
        "num_moe_layers": sum(config.moe_layers),
        "forcing": build_forcing(config),
        "seed": config.training.seed,
        "train_iters": config.training.train_iters,
        "dispatch_parts": config.parallel.moe_dispatch_parts,
        "recomputes_layers": EXPERTS in modules,
        "recomputes_shared": SHARED in modules,
    }
    ops = within_budget(ops, config.moe.activation_budget_bytes)
    return LayerContext(groups, ops, statistics, build_capacity(config), **(fields | others))


def build_capacity(config: Config) -> Capacity | None:
    """The capacity rule of a configuration. Returns None if the model is dropless."""
    moe = config.moe
    if moe.moe_expert_capacity_factor is None:
        return None
    return Capacity(
        moe.moe_expert_capacity_factor,
        DROP_ORDERS[moe.moe_token_drop_policy],
        moe.moe_pad_expert_input_to_capacity,
        config.selection.choices_per_token or 1 if moe.moe_capacity_counts_topk else 1,
        **_free_experts(config.selection),
    )


def _free_experts(selection: Selection) -> dict[str, Any]:
    if not isinstance(selection, FreeExperts):
        return {}
    return {"num_free": selection.free_experts, "tau": selection.moe_free_expert_tau}
