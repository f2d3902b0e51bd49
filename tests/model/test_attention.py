"""Core attention by torch's kernels against the definition in numpy, and in whole models."""

import numpy
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config.option import options
from moe_parallel.config.training import TrainingConfig
from moe_parallel.model.attention import BACKENDS, TorchAttention
from tests.model.small_gpt import Options
from tests.model.test_layouts import (
    LAYOUTS,
    ONE,
    Starts,
    differences,
    model,
    run_all,
    start,  # noqa: F401  a fixture
)

S, B, H, C = 9, 2, 4, 6
ON_CPU = ["auto", "flash", "unfused"]
KERNELS = [*ON_CPU, pytest.param("fused", marks=pytest.mark.gpu)]


def by_definition(q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray) -> numpy.ndarray:
    """One query at a time: [S, B, H, C], [S, B, G, C] twice -> [S, B, H * C]."""
    y = numpy.empty_like(q)
    for s, b, h in numpy.ndindex(q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        scores = k[: s + 1, b, g] @ q[s, b, h] / numpy.sqrt(q.shape[3])
        weights = numpy.exp(scores - scores.max())
        y[s, b, h] = weights @ v[: s + 1, b, g] / weights.sum()
    return y.reshape(*q.shape[:2], -1)


def attention(backend: str, groups: int) -> TorchAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=H * C, num_attention_heads=H, num_query_groups=groups
    )
    built = BACKENDS[backend](config, layer_number=1, attn_mask_type=None, attention_type="self")
    assert isinstance(built, TorchAttention)
    return built


@pytest.mark.parametrize("groups", [H, 2, 1])
@pytest.mark.parametrize("backend", KERNELS)
def test_equals_the_definition(backend: str, groups: int) -> None:
    device, dtype = ("cuda", torch.bfloat16) if backend == "fused" else ("cpu", torch.float64)
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.normal(size=(S, B, heads, C)) for heads in (H, groups, groups))
    given = [torch.from_numpy(each).to(device, dtype) for each in (q, k, v)]
    y = attention(backend, groups)(*given, None)
    assert y.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 0.03
    numpy.testing.assert_allclose(
        y.double().cpu(), by_definition(q, k, v), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("groups", [H, 1])
@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_nothing_of_size_s_by_s_is_kept(backend: str, groups: int) -> None:
    length = 257
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    given = [torch.randn(length, 1, heads, C, requires_grad=True) for heads in (H, groups, groups)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(backend, groups)(*given, None)
    assert kept and max(tensor.numel() for tensor in kept) <= length * H * C


def test_every_value_of_the_flag_has_a_module() -> None:
    (of_the_flag,) = (o for o in options(TrainingConfig) if o.name == "attention_backend")
    assert of_the_flag.choices == tuple(BACKENDS)


CASES: dict[int, dict[str, Options]] = {
    1: {"one": ONE},
    2: {name: LAYOUTS[2][name] for name in ("tp2, sp", "pp2, virtual, recompute")},
}


@pytest.mark.parametrize("world", CASES)
def test_a_model_trains_as_with_megatrons_attention(
    start: Starts,  # noqa: F811
    world: int,
) -> None:
    begun = start("aoe")
    cases = {
        f"{backend}, {name}": model("aoe") | {"attention_backend": backend} | spread
        for name, spread in CASES[world].items()
        for backend in ON_CPU
    }
    assert differences(run_all(world, begun, cases), begun.on_one_rank) == {}
