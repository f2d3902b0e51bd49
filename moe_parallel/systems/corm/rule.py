"""corm: the K experts that a token suits more than it suits the mean token (CoRM)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moe_parallel.balancing.load import StepMean, keeping_dtypes
from moe_parallel.dispatch import Dispatched
from moe_parallel.experts.fp8 import swiglu_experts
from moe_parallel.layers import Rules, System, register
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import LayerConfig, LayerContext
from moe_parallel.layers.system import SCALED_OUTPUT
from moe_parallel.ops.fp32_linear import fp32_linear
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.rules import raw_probability, softmax_of_selected
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.corm import CoRMSelection
from moe_parallel.systems.topk.rule import same_rules


class Reference(nn.Module):
    """The reference state x_ref, `mean_D`: a running mean of the tokens that a layer meets.

        after a step   x_ref <- (1 - alpha) x_ref + alpha m,   m the mean of the step's tokens

    It is fp32, saved with the model, 0 at first, and has no gradient. All micro-batches of a step,
    and evaluation, see that of the step before.
    """

    mean_D: torch.Tensor

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("mean_D", torch.zeros(width))
        self.step = StepMean(width)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return keeping_dtypes(self, fn, super()._apply)

    @torch.no_grad()
    def observe(self, x_TD: torch.Tensor) -> None:
        """Adds this rank's tokens of a micro-batch. All ranks have equally many."""
        self.step.add(x_TD.mean(0, dtype=torch.float64))

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup) -> None:
        """Ends a step. Collective over the ranks whose tokens are the step's."""
        m_D, number = self.step.finish(group)
        moved_D = (1 - self.rate) * self.mean_D.double() + self.rate * m_D
        # Not by `if`, because the host would wait for the device.
        self.mean_D.copy_(torch.where(number > 0, moved_D, self.mean_D.double()))


class ContrastiveLayer(DispatchedLayer):
    """Experts are scored by how much nearer their query is to a token's key than at the reference.

        k   = W_K x / |W_K x|                    the key of a token, one for all experts
        q_e(x) = W_Q^e x / |W_Q^e x|             the query of expert e, at a token or at x_ref
        l_e = (q_e(x) k - q_e(x_ref) k) / sqrt(R)

    The scores l, fp32, have no gradient to x_ref. While it is 0, before the first update,
    q_e(x_ref) is 0. Every rank holds W_K and W_Q completely, as it holds a router.

    Shape suffixes: T tokens of this rank, E experts, R width of keys and queries (d_2), D model
    width.
    """

    w_key_RD: torch.Tensor
    w_query_ERD: torch.Tensor

    def __init__(
        self,
        config: LayerConfig,
        selection: CoRMSelection,
        expert_width: int,
        context: LayerContext,
        system: System,
        **_: Any,  # what later versions of Megatron-Core add
    ) -> None:
        super().__init__(config, selection, context, system)
        e, d, r = self.num_experts, config.hidden_size, selection.corm_key_size
        self.add_replicated_weight("w_key_RD", r, d)
        self.add_replicated_weight("w_query_ERD", e, r, d)
        self.reference = Reference(d, selection.corm_reference_rate)
        self.experts = swiglu_experts(context.fp8)(
            e, d, expert_width, context.groups, context.ops, config.params_dtype
        )

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        if self.routes:
            self.reference.observe(x_TD)
        return self.current_rule()(self.scores(x_TD), tokens)

    def scores(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The contrastive gaps: fp32 [T, E]."""
        e, r, _ = self.w_query_ERD.shape
        w_query_XD = self.replicated(self.w_query_ERD.float()).flatten(0, 1)
        key_TR = F.normalize(fp32_linear(x_TD, self.replicated(self.w_key_RD.float())), dim=1)
        query_TER = fp32_linear(x_TD, w_query_XD).view(-1, e, r)
        # Divided after the product, so that only the queries before it are kept.
        norms_TE = torch.linalg.vector_norm(query_TER, dim=2).clamp(min=_LEAST)
        real_TE = (query_TER @ key_TR[:, :, None]).squeeze(2) / norms_TE
        resting_ER = F.normalize((w_query_XD @ self.reference.mean_D).view(e, r), dim=1)
        return (real_TE - key_TR @ resting_ER.t()) / r**0.5

    def balance(self, group: dist.ProcessGroup) -> None:
        super().balance(group)
        self.reference.update(group)

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        return self.experts(rows.x_MD, rows.probs_MJ, rows.row_map)


_LEAST = 1e-12  # a norm below it counts as this, as in torch's normalize


def rules(selection: CoRMSelection) -> Rules:
    """As a linear router's: one expert has its probability among all, and several share 1."""
    probs = softmax_of_selected if selection.renormalizes else raw_probability
    return same_rules(selection, TopK(selection.moe_router_topk, probs))


def upcycling(selection: CoRMSelection) -> str | None:
    return None if selection.renormalizes else SCALED_OUTPUT


CORM = register(System(CoRMSelection, layer=ContrastiveLayer, rules=rules, upcycling=upcycling))
