"""Hugging Face's MoE blocks without their router: Mixtral and Qwen3-MoE, with every implementation
of experts that the installed transformers has."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from tools.bench.inputs import RoutedLayerWork, leaf
from tools.bench.measurement import Absent, BenchContender, Unavailable, invite, peer_package

FINE_GRAINED = 16  # from this number of experts on, a size is compared with Qwen3-MoE


def model_of(num_experts: int) -> str:
    """The model for a number of experts. The experts of both models are the same code, so each is
    used for the sizes that it is known for."""
    return "HF Qwen3-MoE" if num_experts >= FINE_GRAINED else "HF Mixtral"


def routed_layer_peers(layer: RoutedLayerWork) -> list[BenchContender | Absent]:
    model = model_of(layer.size.n)
    try:
        functions = peer_package("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    except Unavailable as error:
        return [Absent(model, str(error))]
    implementations = ["eager", *sorted(functions.valid_keys())]
    return [
        invite(f"{model} {name}", lambda name=name: _peer(f"{model} {name}", name, layer))
        for name in implementations
    ]


def _peer(name: str, implementation: str, layer: RoutedLayerWork) -> BenchContender:
    weights = layer.linear_gate_up_E2FD.nbytes + layer.linear_out_EDF.nbytes
    check_memory(implementation, layer.size.rows, weights // layer.size.n, layer.x_TD.device.type)
    with torch.device("meta"):
        experts, probs_dtype = _experts(implementation, layer)
    experts.gate_up_proj = torch.nn.Parameter(layer.linear_gate_up_E2FD.detach())
    experts.down_proj = torch.nn.Parameter(layer.linear_out_EDF.detach())
    probs_TK = leaf(layer.probs_TK.to(probs_dtype))

    def forward() -> list[Tensor]:
        return [experts(layer.x_TD, layer.experts_TK, probs_TK)]

    return layer.linear_contender(name, forward, experts.gate_up_proj, experts.down_proj, probs_TK)


def _experts(implementation: str, layer: RoutedLayerWork) -> tuple[torch.nn.Module, torch.dtype]:
    """The module, and the dtype of the probs that its model's router returns."""
    size = layer.size
    if size.n >= FINE_GRAINED:
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

        config = qwen.Qwen3MoeConfig(
            hidden_size=size.d, moe_intermediate_size=size.f, num_experts=size.n,
            num_experts_per_tok=size.K,
        )  # fmt: skip
        config._experts_implementation = implementation
        return qwen.Qwen3MoeExperts(config), layer.x_TD.dtype

    from transformers.models.mixtral import modeling_mixtral as mixtral

    config = mixtral.MixtralConfig(
        hidden_size=size.d, intermediate_size=size.f, num_local_experts=size.n,
        num_experts_per_tok=size.K,
    )  # fmt: skip
    config._experts_implementation = implementation
    return mixtral.MixtralExperts(config), torch.float32


def check_memory(implementation: str, rows: int, expert_bytes: int, device: str) -> None:
    """Check the memory for batched_mm, which copies the weights and their gradients per row."""
    if implementation != "batched_mm":
        return
    needed = 2 * rows * expert_bytes
    if device == "cuda":
        available, _ = torch.cuda.mem_get_info()
    else:
        available = psutil.virtual_memory().available
    if needed > available // 2:
        raise Unavailable(
            f"copies the weights for every row: {needed / 2**30:,.0f} GiB, "
            f"{available / 2**30:,.0f} GiB are free"
        )
