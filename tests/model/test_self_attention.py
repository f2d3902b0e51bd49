"""Our self-attention computes what Megatron-Core's does, on the same weights."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention

from moe_parallel.config import make_config
from moe_parallel.model.self_attention import RotarySelfAttention
from moe_parallel.parallel import destroy_groups
from tests.distributed import run_distributed
from tests.model.small_gpt import SIZES, Options, build, micro_batches

CASES: dict[str, Options] = {
    "grouped queries": {"num_query_groups": 2},
    "norms of heads": {"qk_layernorm": True},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": "core_attn"},
    "reference": {"moe_backend": "reference"},
}


def _gradients(options: Options, *, upstream: bool) -> dict[str, torch.Tensor]:
    """The main gradients of a step; with `upstream`, Megatron-Core turns queries and keys."""
    config = make_config(SIZES | options | {"lr": 0.0, "min_lr": 0.0, "clip_grad": 0.0})
    engine = build(config)
    (chunk,) = engine.chunks
    layers = [each for each in chunk.modules() if isinstance(each, RotarySelfAttention)]
    assert len(layers) == config.model.num_layers
    if upstream:
        for layer in layers:
            layer.__class__ = SelfAttention
    result = engine.step(micro_batches(config, 0, engine))
    found = {name: weight.main_grad.clone() for name, weight in chunk.named_parameters()}
    destroy_groups()
    return {"loss": torch.tensor(result.lm_loss)} | found


def _each(names: list[str]) -> dict[str, Any]:
    return {
        name: [_gradients(CASES[name], upstream=upstream) for upstream in (False, True)]
        for name in names
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (on_rank,) = run_distributed(1, _each, list(CASES))
    return on_rank


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_megatron_core(found: dict[str, Any], name: str) -> None:
    ours, upstream = found[name]
    assert ours.keys() == upstream.keys()
    for key, value in ours.items():
        scale = upstream[key].abs().max().clamp(min=1e-12)
        assert ((value - upstream[key]).abs().max() / scale).item() < 2e-5, key
    assert any("linear_qkv" in key and value.abs().max() > 0 for key, value in ours.items())
