"""The routed family: a router scores the experts, and tokens are dispatched to the chosen ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, cast

import torch

from moe_parallel.balancing.losses import coupling_loss, measured_coupling, with_noise
from moe_parallel.config import RoutedSelection
from moe_parallel.dispatch import Dispatched
from moe_parallel.experts.experts import LowRankExperts, SwiGLUExperts
from moe_parallel.experts.fp8 import low_rank_experts, swiglu_experts
from moe_parallel.layers.dispatched import DispatchedLayer
from moe_parallel.layers.expert_layer import LayerConfig, LayerContext
from moe_parallel.layers.system import System
from moe_parallel.ops.fp32_linear import fp32_linear
from moe_parallel.ops.reference import accumulation_dtype
from moe_parallel.parallel import uniform_like
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens


class RoutedLayer(DispatchedLayer):
    """A router over SwiGLU experts. With top-K it is the classic MoE layer.

    The router is one linear layer without a bias, `w_router_ED`. The large router of the AoE
    paper's ablation is two such layers, `w_router_HD` and `w_router_EH`.
    """

    w_router_ED: torch.Tensor

    def __init__(
        self,
        config: LayerConfig,
        selection: RoutedSelection,
        expert_width: int,
        context: LayerContext,
        system: System,
        **_: Any,  # what later versions of Megatron-Core add
    ) -> None:
        super().__init__(config, selection, context, system)
        self.selection = selection
        e, d, h = self.num_scores, config.hidden_size, selection.moe_router_hidden_size
        shapes = (
            {"w_router_ED": (e, d)} if h is None else {"w_router_HD": (h, d), "w_router_EH": (e, h)}
        )
        for name, shape in shapes.items():
            self.add_replicated_weight(name, *shape)
        self._router = tuple(shapes)
        self._add_experts(expert_width)

    @classmethod
    def variant(cls, selection: RoutedSelection) -> type[RoutedLayer]:
        return cls if selection.moe_gate_low_rank_size is None else FactorizedRoutedLayer

    def _add_experts(self, expert_width: int) -> None:
        self.experts = swiglu_experts(self.context.fp8)(
            self.num_experts,
            self.config.hidden_size,
            expert_width,
            self.context.groups,
            self.context.ops,
            self.config.params_dtype,
        )

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        return self.current_rule()(self.logits(self._jittered(x_TD)), tokens)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The router's logits: fp32 [T, E], those of free experts last."""
        # In fp32, because bf16 would round close logits to ties and change the selection.
        logits = x_TD
        for name in self._router:
            logits = fp32_linear(logits, self.replicated(getattr(self, name).float()))
        return logits

    def _jittered(self, x_TD: torch.Tensor) -> torch.Tensor:
        """In training, tokens times uniform noise around 1, in fp32 (Switch Transformer, 2.2)."""
        eps = self.selection.moe_input_jitter_eps
        if not (self.training and eps):
            return x_TD
        noise = uniform_like(x_TD, self.context.groups, shared=False)
        # In fp32, because bf16 has steps of 1/256 just below 1 and of 1/128 just above 1.
        return x_TD.float() * (1 + eps * (2 * noise - 1))

    def coupling_loss(self, choices: Choices, tokens: Tokens) -> torch.Tensor:
        """Of the weights alone. Its noise is that of the step and the layer, on every rank."""
        groups, router_ED = self.context.groups, self.w_router_ED
        place = f"{self.context.seed} {self.context.iteration()} {self.layer_number}"
        noise = torch.Generator(router_ED.device).manual_seed(zlib.crc32(place.encode()))
        wide_ED = self.replicated(router_ED.to(accumulation_dtype(router_ED.dtype)))
        gates_LDF = cast(SwiGLUExperts, self.experts).gates()
        m = measured_coupling(with_noise(wide_ED, noise), gates_LDF, groups)
        totals = self.context.statistics.recipient()
        if totals is not None:
            totals.add_loss(self.layer_number, "erc_norm", m.own_E.detach().mean())
        return coupling_loss(m, self.selection.moe_erc_alpha, groups)

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        return self.experts(rows.x_MD, rows.probs_MJ, rows.row_map)


class FactorizedRoutedLayer(RoutedLayer):
    """The AoE paper's ablation: a router over AoE's experts, with W_g = W_down W_up.

    Every rank holds all of W_down, as in an autonomous layer, so that the two differ only in the
    selection.
    """

    w_down_EDR: torch.Tensor
    experts: LowRankExperts

    def _add_experts(self, expert_width: int) -> None:
        d, rank = self.config.hidden_size, self.selection.moe_gate_low_rank_size
        assert rank is not None
        self.add_replicated_weight("w_down_EDR", self.num_experts, d, rank)
        self.experts = low_rank_experts(self.context.fp8)(
            self.num_experts,
            d,
            rank,
            expert_width,
            self.context.groups,
            self.context.ops,
            self.config.params_dtype,
            up_std=self.selection.up_std,
        )

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        w_down_LDR = self.experts.local(self.replicated(self.w_down_EDR))
        return self.experts(rows.x_MD, rows.probs_MJ, rows.row_map, w_down_LDR)

    def compute_parts(self, rows: Iterator[Dispatched[Any]], parts: int) -> Iterator[torch.Tensor]:
        w_down_LDR = self.experts.local(self.replicated(self.w_down_EDR))
        yield from self.experts.outputs_of_parts(rows, w_down_LDR, parts)

    def expert_weights(self) -> Iterable[torch.Tensor]:
        return chain(super().expert_weights(), [self.w_down_EDR])
