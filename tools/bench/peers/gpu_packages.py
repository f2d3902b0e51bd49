"""Packages of MoE kernels for GPUs: grouped_gemm, MegaBlocks, ScatterMoE and SonicMoE.

They need CUDA, and their interfaces change between releases. A package that no longer fits is
listed as absent, with its error.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops import RowMap
from tools.bench.contender import Absent, BenchContender, Values, invite, peer_package
from tools.bench.inputs import leaf
from tools.bench.layer import RoutedLayerWork

GROUPED_GEMM, MEGABLOCKS = "grouped_gemm", "MegaBlocks"
SCATTERMOE, SONICMOE = "ScatterMoE", "SonicMoE"


def grouped_gemm_peers(
    x_NI: Tensor, w_EIO: Tensor, row_map: RowMap, dy_NO: Tensor
) -> list[BenchContender | Absent]:
    def build() -> BenchContender:
        gmm = peer_package("grouped_gemm", x_NI).ops.gmm
        counts_E = row_map.counts_E
        return BenchContender(
            GROUPED_GEMM,
            lambda: [gmm(x_NI, w_EIO, counts_E)],
            {"x": x_NI, "w": w_EIO},
            frozenset({"w"}),
            (dy_NO,),
        )

    return [invite(GROUPED_GEMM, build)]


def routed_layer_peers(layer: RoutedLayerWork) -> list[BenchContender | Absent]:
    return [
        invite(MEGABLOCKS, lambda: _megablocks(layer)),
        invite(SCATTERMOE, lambda: _scattermoe(layer)),
        invite(SONICMOE, lambda: _sonicmoe(layer)),
    ]


def _megablocks(layer: RoutedLayerWork) -> BenchContender:
    peer_package("megablocks", layer.x_TD)
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    size = layer.size
    arguments = Arguments(
        hidden_size=size.d, ffn_hidden_size=size.f, moe_num_experts=size.n, moe_top_k=size.K,
        mlp_type="glu", mlp_impl="grouped", activation_fn=functional.silu, bias=False,
        bf16=layer.x_TD.dtype == torch.bfloat16, fp16=layer.x_TD.dtype == torch.float16,
        device=layer.x_TD.device,
    )  # fmt: skip
    mlp = ParallelDroplessMLP(arguments)
    w_gate_EFD, w_up_EFD = layer.linear_gate_up_E2FD.detach().chunk(2, dim=1)
    weights = {"w_gate": mlp.mlp.w1, "w_up": mlp.mlp.v1, "w_out": mlp.mlp.w2}
    values = (w_gate_EFD, w_up_EFD, layer.w_out_EFD.detach())
    for weight, value in zip(weights.values(), values, strict=True):
        weight.data.copy_(value.reshape(weight.shape))
    probs_TK = leaf(layer.probs_TK.to(layer.x_TD.dtype))

    def forward() -> list[Tensor]:
        y_TD, _ = mlp.forward_once(layer.x_TD, probs_TK, layer.experts_TK)
        return [y_TD]

    def canonical(gradients: Values) -> Values:
        per_expert = {w: gradients[w].view(size.n, size.f, size.d) for w in weights}
        gate_up = torch.cat([per_expert["w_gate"], per_expert["w_up"]], dim=1)
        return {
            "x": gradients["x"],
            "probs": gradients["probs"],
            "w_gate_up": gate_up.transpose(1, 2),
            "w_out": per_expert["w_out"],
        }

    leaves = {"x": layer.x_TD, "probs": probs_TK} | weights
    return BenchContender(
        MEGABLOCKS, forward, leaves, frozenset(weights), (layer.dy_TD,), canonical
    )


def _scattermoe(layer: RoutedLayerWork) -> BenchContender:
    peer_package("scattermoe", layer.x_TD)
    from scattermoe.mlp import GLUMLP

    size = layer.size
    with torch.device("meta"):
        mlp = GLUMLP(size.d, size.f, size.n, size.K, activation=torch.nn.SiLU())
    up_first_E2FD = layer.linear_gate_up_E2FD.detach().roll(size.f, dims=1)
    mlp.experts.weight = torch.nn.Parameter(up_first_E2FD)
    mlp.output_experts.weight = torch.nn.Parameter(layer.linear_out_EDF.detach())
    probs_TK = leaf(layer.probs_TK.to(layer.x_TD.dtype))
    plain = layer.linear_contender(
        SCATTERMOE,
        lambda: [mlp(layer.x_TD, probs_TK, layer.experts_TK)],
        mlp.experts.weight,
        mlp.output_experts.weight,
        probs_TK,
    )

    def canonical(gradients: Values) -> Values:
        in_order = gradients["w_gate_up"].roll(size.f, dims=1)
        return plain.canonical(gradients | {"w_gate_up": in_order})

    return replace(plain, canonical=canonical)


def _sonicmoe(layer: RoutedLayerWork) -> BenchContender:
    sonicmoe = peer_package("sonicmoe", layer.x_TD)
    size = layer.size
    # In its first matrix, gate and up rows alternate, and the experts are the last axis.
    interleaved_E2FD = (
        layer.linear_gate_up_E2FD.detach().unflatten(1, (2, size.f)).transpose(1, 2).flatten(1, 2)
    )
    w_gate_up_E2FD = leaf(interleaved_E2FD.contiguous())
    probs_TK = leaf(layer.probs_TK.to(layer.x_TD.dtype))
    token_S = torch.arange(size.T, device=probs_TK.device).repeat_interleave(size.K).int()
    expert_S = layer.experts_TK.flatten().int()

    def forward() -> list[Tensor]:
        y_TD, _ = sonicmoe.moe_general_routing_inputs(
            layer.x_TD, probs_TK.flatten(), token_S, expert_S,
            w_gate_up_E2FD.permute(1, 2, 0), None, layer.linear_out_EDF.permute(1, 2, 0), None,
            size.n, torch.cuda.current_stream().cuda_stream,
            sonicmoe.enums.ActivationType.SWIGLU,
        )  # fmt: skip
        return [y_TD]

    plain = layer.linear_contender(
        SONICMOE, forward, w_gate_up_E2FD, layer.linear_out_EDF, probs_TK
    )

    def canonical(gradients: Values) -> Values:
        apart = gradients["w_gate_up"].unflatten(1, (size.f, 2)).transpose(1, 2).flatten(1, 2)
        return plain.canonical(gradients | {"w_gate_up": apart})

    return replace(plain, canonical=canonical)
