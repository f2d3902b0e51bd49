"""The dense layer against Megatron-Core's, which has the same weights."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import ParallelConfig
from moe_parallel.experts.dense import DenseMLP
from moe_parallel.ops import BACKENDS, select_backend
from moe_parallel.parallel import destroy_groups, initialize_groups
from tests.distributed import run_distributed

S, B, D, WIDTH = 4, 3, 16, 24


def _kept(backward: list[torch.Tensor]) -> int:
    """Bytes of the different tensors that are saved for the backward pass."""
    storages = {each.untyped_storage().data_ptr(): each for each in backward}
    return sum(each.untyped_storage().nbytes() for each in storages.values())


def _run(layer: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
    """Output and gradients for fixed weights and input, and the bytes kept for the latter."""
    generator = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator))
    x_SBD = torch.randn(S, B, D, generator=generator).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_SBD, bias = layer(x_SBD)
    assert bias is None
    y_SBD.backward(torch.randn(S, B, D, generator=generator))
    weights = [weight.grad for weight in layer.parameters()]
    return [y_SBD.detach(), x_SBD.grad, *weights], _kept(saved)


def _both(backend: str) -> Any:
    """On a rank: the results of our layer and of Megatron-Core's."""
    groups = initialize_groups(ParallelConfig())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        ffn_hidden_size=WIDTH,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    ours = _run(DenseMLP(config, linear, select_backend(backend), groups.tp))
    stock = _run(MLP(config, linear, ffn_hidden_size=WIDTH, tp_group=groups.tp))
    destroy_groups()
    return ours, stock


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "auto"])
def test_equals_megatron_cores_and_keeps_less(backend: str) -> None:
    (((ours, kept), (stock, kept_by_stock)),) = run_distributed(1, _both, backend)
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if backend == "native":
        assert kept_by_stock - kept == 2 * S * B * WIDTH * 4  # SiLU of the gate, and up + 0
