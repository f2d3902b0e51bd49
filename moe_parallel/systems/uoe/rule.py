"""uoe: the K experts whose routing neurons have the largest norms (Union-of-Experts)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_parallel.dispatch import Dispatched
from moe_parallel.experts.fp8 import swiglu_experts
from moe_parallel.layers import Rules, System, register
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import LayerConfig, LayerContext
from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.rules import NODES
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK
from moe_parallel.systems.topk.rule import same_rules
from moe_parallel.systems.uoe import UoESelection


class UnionLayer(DispatchedLayer):
    """The first R (N_s) neurons of each SwiGLU expert compute every token; their norms select.

        u_i = SiLU(x W_g^i) * (x W_p^i)                  of the routing neurons, for all E experts
        s_i = ||u_i||_2;  I = the K largest;  g = softmax(s[I])
        y   = sum_i u_i W_o^i + sum_(i in I) g_i E_i(x)

    E_i is the rest of the expert, to which tokens are dispatched. The routing neurons of all
    experts together are a shared expert of width E R whose activations select. Each token needs
    all of them, so every rank holds their weights completely, as it holds a router's.

    Shape suffixes: T tokens of this rank, E all experts, R routing neurons of each, D model width.
    """

    scores_are_norms = True
    w_gate_up_ED2R: torch.Tensor  # W_g at index 0, W_p at index 1 of the axis of size 2
    w_out_ERD: torch.Tensor

    def __init__(
        self,
        config: LayerConfig,
        selection: UoESelection,
        expert_width: int,
        context: LayerContext,
        system: System,
        **_: Any,  # what later versions of Megatron-Core add
    ) -> None:
        super().__init__(config, selection, context, system)
        e, d = self.num_experts, config.hidden_size
        r = selection.routing_neurons(expert_width, e)
        self.add_replicated_weight("w_gate_up_ED2R", e, d, 2, r)
        self.add_replicated_weight("w_out_ERD", e, r, d)
        self.node = NODES[selection.uoe_norm_of]
        self.gates_routing = selection.uoe_gate_routing
        self.experts = swiglu_experts(context.fp8)(
            e, d, expert_width - r, context.groups, context.ops, config.params_dtype
        )

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        u_TER, norms_TE = self._activations(x_TD)
        choices = self.current_rule()(norms_TE, tokens)
        return replace(choices, output_TD=self._output_of_routing(u_TER, choices))

    def _activations(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all routing neurons, and their norms in fp32: [T, E, R] and [T, E]."""
        w_ED2R = self.replicated(self.w_gate_up_ED2R)
        # W_g of all experts side by side, then W_p.
        gate_up_TX = x_TD @ w_ED2R.permute(1, 2, 0, 3).flatten(1)
        u_TER = self.context.ops.swiglu_halves(gate_up_TX).unflatten(1, (self.num_experts, -1))
        gate_TER = gate_up_TX.chunk(2, dim=1)[0].view_as(u_TER)
        node_TER = self.node(gate_TER, u_TER)
        dtype = accumulation_dtype(node_TER.dtype)
        return u_TER, torch.linalg.vector_norm(node_TER.to(dtype), dim=2)

    def _output_of_routing(self, u_TER: torch.Tensor, choices: Choices) -> torch.Tensor:
        """sum_i u_i W_o^i over all experts: [T, D]."""
        if self.gates_routing:
            gate_TE = torch.ones_like(choices.probabilities_TE)
            gate_TE = gate_TE.scatter(1, choices.experts_TK, choices.probs_TK)
            u_TER = u_TER * gate_TE.unsqueeze(-1).to(u_TER.dtype)
        return u_TER.flatten(1) @ self.replicated(self.w_out_ERD).flatten(0, 1)

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        return self.experts(rows.x_MD, rows.probs_MJ, rows.row_map)


def rules(selection: UoESelection) -> Rules:
    return same_rules(selection, TopK(selection.moe_router_topk))


UOE = register(
    System(
        UoESelection,
        layer=UnionLayer,
        rules=rules,
    )
)
