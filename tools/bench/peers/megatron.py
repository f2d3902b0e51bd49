"""Megatron-Core's MoELayer with SequentialMLP, its experts without Transformer Engine, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.config import Config
from moe_parallel.platform.megatron import suppress_warnings
from tools.bench.inputs import RoutedLayerWork
from tools.bench.measurement import Absent, BenchContender, Unavailable, invite

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_parallel.parallel import Groups
    from tools.bench.sizes import BenchSize, ModelSize

NAME = "Megatron SequentialMLP"


@contextmanager
def one_rank(device: str = "cpu") -> Iterator[Groups]:
    """Inside, Megatron-Core works on the device, with process groups of this process only."""
    suppress_warnings()  # before Megatron-Core is imported
    from moe_parallel.training.standalone import single_process

    with single_process(Config(), "nccl" if device == "cuda" else "gloo") as groups:
        yield groups


def moe_config(
    size: BenchSize | ModelSize, dtype: torch.dtype, **options: Any
) -> TransformerConfig:
    """Megatron-Core's configuration of SwiGLU experts without an auxiliary loss."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        hidden_size=size.d,
        ffn_hidden_size=size.f,
        num_moe_experts=size.n,
        moe_ffn_hidden_size=size.f,
        moe_router_topk=size.K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **options,
    )


def routed_layer_peers(layer: RoutedLayerWork) -> list[BenchContender | Absent]:
    return [invite(NAME, lambda: _peer(layer))]


class GivenRouting(torch.nn.Module):
    """Replaces Megatron's router: it returns the probs and choices that all contenders get."""

    def __init__(self, layer: RoutedLayerWork) -> None:
        super().__init__()
        self.layer = layer
        chosen = torch.zeros(layer.size.T, layer.size.n, dtype=torch.bool)
        self.chosen_TE = chosen.scatter(1, layer.experts_TK, True)

    def forward(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        zeros_TE = torch.zeros(self.chosen_TE.shape)
        return zeros_TE.scatter(1, self.layer.experts_TK, self.layer.probs_TK), self.chosen_TE


def _peer(layer: RoutedLayerWork) -> BenchContender:
    if torch.cuda.is_available():  # then Megatron-Core works only on the GPU
        raise Unavailable("a peer on hosts without a GPU")
    if not torch.distributed.is_initialized():
        raise Unavailable("its process groups are not made (`one_rank`)")
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    size = layer.size
    config = moe_config(
        size,
        layer.x_TD.dtype,
        num_layers=1,
        num_attention_heads=1,
        moe_router_dtype="fp32",
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    build = get_moe_module_spec(use_te=False, num_experts=size.n, moe_grouped_gemm=False)
    moe = build(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    moe.router = GivenRouting(layer)
    experts = moe.experts.local_experts
    for index, expert in enumerate(experts):
        expert.linear_fc1.weight.data = layer.linear_gate_up_E2FD.detach()[index]
        expert.linear_fc2.weight.data = layer.linear_out_EDF.detach()[index]

    def forward() -> list[Tensor]:
        output, _ = moe(layer.x_TD.unsqueeze(1))  # [sequence, batch, width]
        return [output.squeeze(1)]

    return layer.matrices_contender(
        NAME,
        forward,
        [expert.linear_fc1.weight for expert in experts],
        [expert.linear_fc2.weight for expert in experts],
    )
