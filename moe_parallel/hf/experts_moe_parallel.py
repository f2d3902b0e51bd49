"""Low-rank experts, free experts and merged experts; and dense SwiGLU layers.

Shape suffixes: B sequences, S tokens of each, T = B * S, E experts, K slots per token, D model
width, R low-rank size (d_low), Z free experts, C constant experts, A the two parts of their output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_moe_parallel import MoeParallelConfig


class MoeParallelMLP(nn.Module):
    """A dense SwiGLU layer: (SiLU(x W_g) * (x W_p)) W_o."""

    def __init__(self, config: MoeParallelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MoeParallelFreeExperts(nn.Module):
    """Experts without matrices: 0, the input x, or a_1 x + a_2 v, (a_1, a_2) = softmax(x W_c^T).

    Their scores are the last: those of zero experts, then copies, then constant experts (MoE++).
    """

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        self.num_experts, self.number = config.num_experts, config.free_experts
        self.zero_experts = config.zero_experts
        self.renormalizes = config.zero_expert_gate == "renormalize"
        self.copies = slice(self.zero_experts, self.zero_experts + config.copy_experts)
        self.constants = slice(self.copies.stop, self.number)
        self.w_constant = self.v_constant = None
        if config.constant_experts:
            c, d = config.constant_experts, config.hidden_size
            self.w_constant = nn.Parameter(torch.empty(c, 2, d))
            self.v_constant = nn.Parameter(torch.empty(c, d))

    def forward(
        self, x_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The choices of the other experts, their weights, and the output of the free ones."""
        free_TK = index_TK - self.num_experts + 1  # from 1
        if self.renormalizes:
            is_zero_TK = (free_TK > 0) & (free_TK <= self.zero_experts)
            weights_TK = weights_TK.masked_fill(is_zero_TK, 0)
            sums_T1 = weights_TK.sum(dim=-1, keepdim=True)
            weights_TK = weights_TK / (sums_T1 + (sums_T1 == 0))
        weights_TZ = weights_TK.new_zeros(x_TD.shape[0], 1 + self.number)  # 0: others
        weights_TZ = weights_TZ.scatter_add(1, free_TK.clamp(min=0), weights_TK)[:, 1:]
        # Kernels want an expert in each slot, so a free choice becomes any of them with weight 0.
        others_TK = weights_TK.masked_fill(free_TK > 0, 0)
        return index_TK % self.num_experts, others_TK, self._output(x_TD, weights_TZ)

    def _output(self, x_TD: torch.Tensor, weights_TZ: torch.Tensor) -> torch.Tensor:
        share_T = weights_TZ[:, self.copies].sum(dim=-1)  # of x
        if self.w_constant is None or self.v_constant is None:
            return (x_TD * share_T[:, None]).to(x_TD.dtype)
        logits_TCA = torch.einsum("td,cad->tca", x_TD.float(), self.w_constant.float())
        weights_TC = weights_TZ[:, self.constants]
        of_x_TC, of_v_TC = (weights_TC[..., None] * logits_TCA.softmax(dim=-1)).unbind(-1)
        share_T = share_T + of_x_TC.sum(dim=-1)
        constant_TD = of_v_TC.to(self.v_constant.dtype) @ self.v_constant
        return (x_TD * share_T[:, None] + constant_TD).to(x_TD.dtype)


class MoeParallelLowRankExperts(nn.Module):
    """E(x) = (SiLU(C W_up) * (x W_p)) W_o, with C = x W_down from the gate.

    The W_up of all experts are one 2-dimensional matrix, so that vLLM does not take the module for
    SwiGLU experts. It then computes with this forward pass.
    """

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        assert config.low_rank_size is not None
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = e
        self.gate_proj = nn.Parameter(torch.empty(e * f, config.low_rank_size))
        self.up_proj = nn.Parameter(torch.empty(e, f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        low_rank_states: torch.Tensor,
    ) -> torch.Tensor:
        """[T, D], [T, K], [T, K], C [T, E, R] -> [T, D]"""
        y_TD = torch.zeros_like(hidden_states)
        gates = self.gate_proj.chunk(self.num_experts)
        for expert in range(self.num_experts):
            weight_T = (top_k_weights * (top_k_index == expert)).sum(dim=-1)
            if torch.compiler.is_compiling():  # all tokens, because no size may depend on data
                token: Any = slice(None)
            else:
                token = weight_T.nonzero()[:, 0]
            gate = F.silu(F.linear(low_rank_states[token, expert], gates[expert]))
            up = F.linear(hidden_states[token], self.up_proj[expert])
            y = F.linear(gate * up, self.down_proj[expert]) * weight_T[token, None]
            y_TD[token] += y.to(y_TD.dtype)
        return y_TD


class MoeParallelMergedExperts(nn.Module):
    """Lory: one SwiGLU expert for each sequence, the weighted sum of all experts' matrices."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.config = config
        self.router_out = nn.Parameter(torch.empty(e, d))
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def merge(
        self, prompt: torch.Tensor, is_token_BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The merged expert of each prompt [B, S, D], by the mean of its tokens."""
        counts_BS = torch.ones_like(prompt[..., 0], dtype=torch.float32)
        if is_token_BS is not None:
            counts_BS = is_token_BS.to(counts_BS)
        if self.config.prefix_length is not None:
            counts_BS = counts_BS * (counts_BS.cumsum(dim=1) <= self.config.prefix_length)
        mean_BD = (prompt.float() * counts_BS[..., None]).sum(dim=1)
        mean_BD = mean_BD / counts_BS.sum(dim=1, keepdim=True)
        return self._merged(F.linear(mean_BD, self.router_out.float()).softmax(dim=-1))

    def _merged(self, e_BE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = (
            torch.einsum("be,eij->bij", e_BE, matrix.float()).to(matrix.dtype)
            for matrix in (self.gate_up_proj, self.down_proj)
        )
        return gate_up, down

    def forward(
        self, hidden_states: torch.Tensor, merged: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[B, S, D] through the merged expert of each sequence."""
        gate, up = (hidden_states @ merged[0].transpose(1, 2)).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ merged[1].transpose(1, 2)

    def by_segments(self, x_BSD: torch.Tensor, is_token_BS: torch.Tensor | None) -> torch.Tensor:
        """[B, S, D], each segment through the merge of the one before it."""
        assert self.config.segment_length is not None
        y_BSD = torch.zeros_like(x_BSD)
        for row, x_SD in enumerate(x_BSD):
            places = torch.arange(len(x_SD), device=x_SD.device)
            if is_token_BS is not None:
                places = places[is_token_BS[row].bool()]
            before = None
            for segment in places.split(self.config.segment_length):
                if before is None and self.config.uniform_first_segment:
                    e_BE = self.router_out.new_full((1, len(self.router_out)), 1.0).float()
                    merged = self._merged(e_BE / e_BE.sum())
                else:
                    merged = self.merge(x_SD[None, segment if before is None else before], None)
                y_BSD[row, segment] = self(x_SD[None, segment], merged)[0]
                before = segment
        return y_BSD
