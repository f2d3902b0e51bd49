"""Every operator in plain torch: peers on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops import RowMap
from tools.bench.inputs import RoutedLayerWork, leaf
from tools.bench.measurement import Absent, BenchContender

GROUPED_MM = "torch grouped_mm"
LIST_OF_EXPERTS = "list of experts"


def token_of_row(row_map: RowMap) -> Tensor:
    """token_N, for rows without padding."""
    return row_map.slots_N.div(row_map.rows_TK.size(1), rounding_mode="floor")


def unpermute(y_ND: Tensor, row_map: RowMap, probs_TK: Tensor) -> Tensor:
    probs_N = probs_TK.flatten()[row_map.slots_N].to(y_ND.dtype)
    y_TD = y_ND.new_zeros(probs_TK.size(0), y_ND.size(1))
    return y_TD.index_add(0, token_of_row(row_map), y_ND * probs_N.unsqueeze(1))


def routing_map(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """slots_N, rows_TK and counts_E, if every choice is dispatched."""
    slots_N = experts_TK.flatten().argsort(stable=True)
    rows_S = torch.empty_like(slots_N)
    rows_S[slots_N] = torch.arange(slots_N.numel(), device=slots_N.device)
    counts_E = torch.bincount(experts_TK.flatten(), minlength=num_experts)
    return slots_N, rows_S.view_as(experts_TK), counts_E


def split_and_multiply(x_NI: Tensor, w_EIO: Tensor, counts_E: Tensor) -> Tensor:
    groups = x_NI.split(counts_E.tolist())
    return torch.cat([x_GI @ w_IO for x_GI, w_IO in zip(groups, w_EIO.unbind(), strict=True)])


def swiglu(gate_NF: Tensor, up_NF: Tensor, probs_N: Tensor) -> Tensor:
    return (functional.silu(gate_NF) * up_NF * probs_N.unsqueeze(1)).to(gate_NF.dtype)


def norm_topk(x_TD: Tensor, w_EDR: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """norms_TE, experts_TK, and C of all experts, c_TER."""
    c_TER = torch.einsum("td,edr->ter", x_TD, w_EDR)
    norms_TE = torch.linalg.vector_norm(c_TER.float(), dim=-1)
    return norms_TE, norms_TE.detach().topk(k).indices, c_TER


def autonomous_layer(
    x_TD: Tensor, w_down_EDR: Tensor, w_up_ERW: Tensor, w_p_EDW: Tensor, w_out_EWD: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """AoE, written like Algorithm 2: y_TD and experts_TK. C of every expert is kept."""
    norms_TE, experts_TK, c_TER = norm_topk(x_TD, w_down_EDR, k)
    probs_TK = norms_TE.gather(1, experts_TK).softmax(-1)
    y_TD = torch.zeros_like(x_TD)
    for expert in range(w_down_EDR.size(0)):
        token_G, choice_G = torch.where(experts_TK == expert)
        c_GR = c_TER[token_G, expert]
        h_GW = swiglu(
            c_GR @ w_up_ERW[expert], x_TD[token_G] @ w_p_EDW[expert], probs_TK[token_G, choice_G]
        )
        y_TD = y_TD.index_add(0, token_G, h_GW @ w_out_EWD[expert])
    return y_TD, experts_TK


def routed_layer_peers(layer: RoutedLayerWork) -> list[BenchContender | Absent]:
    return [_list_of_experts(layer), _grouped_mm(layer)]


def _list_of_experts(layer: RoutedLayerWork) -> BenchContender:
    """One expert after the other: `where`, two linear layers, `index_add`."""
    gate_up = [leaf(w) for w in layer.linear_gate_up_E2FD.detach().unbind()]
    out = [leaf(w) for w in layer.linear_out_EDF.detach().unbind()]

    def forward() -> list[Tensor]:
        y_TD = torch.zeros_like(layer.x_TD)
        for expert in range(layer.size.n):
            token_G, choice_G = torch.where(layer.experts_TK == expert)
            gate_GF, up_GF = functional.linear(layer.x_TD[token_G], gate_up[expert]).chunk(2, -1)
            h_GF = swiglu(gate_GF, up_GF, layer.probs_TK[token_G, choice_G])
            y_TD.index_add_(0, token_G, functional.linear(h_GF, out[expert]))
        return [y_TD]

    return layer.matrices_contender(LIST_OF_EXPERTS, forward, gate_up, out)


def _grouped_mm(layer: RoutedLayerWork) -> BenchContender | Absent:
    if not hasattr(functional, "grouped_mm"):
        return Absent(GROUPED_MM, f"torch {torch.__version__} has no grouped_mm")

    def forward() -> list[Tensor]:
        slots_N, _, counts_E = routing_map(layer.experts_TK, layer.size.n)
        ends_E = counts_E.cumsum(0).int()
        token_N = slots_N.div(layer.size.K, rounding_mode="floor")
        x_ND = layer.x_TD.index_select(0, token_N)
        gate_up_N2F = functional.grouped_mm(x_ND, layer.w_gate_up_ED2F, offs=ends_E)
        h_NF = swiglu(*gate_up_N2F.chunk(2, -1), layer.probs_TK.flatten()[slots_N])
        y_ND = functional.grouped_mm(h_NF, layer.w_out_EFD, offs=ends_E)
        return [torch.zeros_like(layer.x_TD).index_add(0, token_N, y_ND)]

    return layer.contender(GROUPED_MM, forward)
