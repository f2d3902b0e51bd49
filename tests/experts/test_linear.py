"""Linear layers against Megatron-Core's, and their main gradients against exact sums."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import ParallelConfig
from moe_parallel.experts.dense import linear_by
from moe_parallel.ops import BACKENDS, select_backend
from moe_parallel.parallel import destroy_groups, initialize_groups
from tests.distributed import run_distributed

S, B, D, F = 6, 3, 16, 24
NAMES = [name for name in BACKENDS if name != "auto"]


def _config(tp: int, **options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        tensor_model_parallel_size=tp,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        **options,
    )


def _build(kinds: Any, config: TransformerConfig, group: Any, bias: bool = False) -> Any:
    """A layer of columns and one of rows, D -> F -> D, with weights of this rank's own."""
    column, row = kinds
    common = {"config": config, "init_method": None, "bias": bias, "tp_group": group}
    layers = torch.nn.ModuleList(
        [
            column(D, F, gather_output=False, skip_bias_add=False, **common),
            row(F, D, input_is_parallel=True, skip_bias_add=False, **common),
        ]
    )
    generator = torch.Generator().manual_seed(group.rank())
    for weight in layers.parameters():
        weight.data = torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return layers


def _through(layers: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of x and of the weights."""
    x = x.clone().requires_grad_()
    h, _ = layers[0](x)
    y, _ = layers[1](torch.tanh(h))
    y.backward(dy)
    return [y.detach(), x.grad, *(weight.grad for weight in layers.parameters())]


def _both(size: int, backend: str, sequence_parallel: bool) -> Any:
    groups = initialize_groups(ParallelConfig(tensor_model_parallel_size=size))
    config = _config(size, sequence_parallel=sequence_parallel)
    generator = torch.Generator().manual_seed(7)
    x, dy = (torch.randn(S, B, D, generator=generator) for _ in range(2))
    if sequence_parallel:
        x, dy = (each.chunk(size)[groups.tp.rank()] for each in (x, dy))
    # Under sequence parallelism the gradient of a bias is summed at the end of a step, not here.
    bias = not sequence_parallel
    ours = _through(_build(linear_by(select_backend(backend)), config, groups.tp, bias), x, dy)
    stock = _through(
        _build((ColumnParallelLinear, RowParallelLinear), config, groups.tp, bias), x, dy
    )
    destroy_groups()
    return ours, stock


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(
    ("size", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["1", "tp2", "tp2, sp"]
)
def test_equals_megatron_cores(size: int, sequence_parallel: bool, backend: str) -> None:
    for ours, stock in run_distributed(size, _both, size, backend, sequence_parallel):
        for one, other in zip(ours, stock, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _summed(backend: str) -> Any:
    """Main gradients of two passes in bf16, before them 1, and their exact sums."""
    groups = initialize_groups(ParallelConfig())
    kinds = linear_by(select_backend(backend))
    layer = _build(kinds, _config(1, params_dtype=torch.bfloat16), groups.tp)[0]
    layer.weight.main_grad = torch.ones(F, D)
    layer.weight.grad_added_to_main_grad = False
    layer.add_to_main_gradients()
    generator = torch.Generator().manual_seed(7)
    exact = torch.ones(F, D, dtype=torch.float64)
    for _ in range(2):
        x, dy = (torch.randn(S, B, n, generator=generator).bfloat16() for n in (D, F))
        layer(x.requires_grad_())[0].backward(dy)
        exact += dy.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    found = layer.weight.main_grad.clone(), layer.weight.grad_added_to_main_grad
    destroy_groups()
    return *found, exact


@pytest.mark.parametrize("backend", NAMES)
def test_main_gradients_are_sums_that_were_not_rounded(backend: str) -> None:
    ((main, was_added, exact),) = run_distributed(1, _summed, backend)
    assert was_added
    torch.testing.assert_close(main.double(), exact, rtol=1e-5, atol=1e-5)
