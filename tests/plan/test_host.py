"""The calls of a layer by plan are about those that torch's dispatcher sees in the program."""

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from moe_parallel.parallel import destroy_groups
from moe_parallel.plan.host import OURS, calls_of_layer
from moe_parallel.plan.layout import layout_of
from tests.distributed import run_distributed
from tests.plan.running import (
    ALL_CHOSEN,
    AOE,
    DENSE,
    Options,
    batches,
    config_of,
    engine_of,
    factors_stay_bf16,
)

#: Operators that launch no kernel.
WITHOUT_KERNEL = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "_local_scalar")


class Calls(TorchDispatchMode):
    """Counts the operators that launch a kernel, or would on a GPU."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.number += not (func.is_view or name.startswith(WITHOUT_KERNEL))
        return func(*args, **(kwargs or {}))


def _calls(world_size: int, cases: dict[str, Options]) -> dict[str, tuple[int, float]]:
    """By case: the calls of a layer by plan, and those counted in two more layers, halved."""
    found = {}
    for name, options in cases.items():
        counted = []
        for layers in (2, 4):
            config = config_of({"bf16": True, "num_layers": layers} | options)
            engine = engine_of(config)
            (chunk,) = engine.chunks
            chunk.train()
            batch = next(batches(config))
            batch.pop("position_ids")
            with factors_stay_bf16(), Calls() as calls:
                chunk(batch.pop("tokens"), None, None, **batch).sum().backward()
            counted.append(calls.number)
            layout = layout_of(config, world_size)
            destroy_groups()
        is_moe = config.moe.num_experts is not None
        found[name] = calls_of_layer(layout, is_moe), (counted[1] - counted[0]) / 2
    return found


def _compare(found: dict[str, tuple[int, float]]) -> None:
    for name, (planned, counted) in found.items():
        assert planned == pytest.approx(counted, rel=0.1), name


@pytest.mark.full
def test_on_one_rank() -> None:
    cases = {
        "dense": DENSE,
        "topk": {},
        "aoe": AOE | ALL_CHOSEN,
        "recomputed": {"recompute_granularity": "full"},
    }
    _compare(run_distributed(1, _calls, 1, cases)[0])


@pytest.mark.full
def test_on_two_ranks() -> None:
    sequence_parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    cases = {
        "dense, sp": DENSE | sequence_parallel,
        "topk, ep": {"expert_model_parallel_size": 2},
        "aoe, sp": AOE | ALL_CHOSEN | sequence_parallel,
    }
    _compare(run_distributed(2, _calls, 2, cases)[0])


def _calls_of_attention() -> int:
    """Of the forward pass, in one layer, without the residual."""
    config = config_of({"bf16": True} | DENSE)
    engine = engine_of(config)
    (chunk,) = engine.chunks
    counted = 0
    calls = Calls()

    def before(*_: Any) -> None:
        nonlocal counted
        counted -= calls.number

    def after(*_: Any) -> None:
        nonlocal counted
        counted += calls.number

    (layer,) = [m for name, m in chunk.named_modules() if name.endswith("decoder.layers.0")]
    for module in (layer.input_layernorm, layer.self_attention):
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    batch = next(batches(config))
    batch.pop("position_ids")
    with factors_stay_bf16(), calls:
        chunk(batch.pop("tokens"), None, None, **batch)
    destroy_groups()
    return counted


@pytest.mark.full
def test_the_calls_of_attention() -> None:
    (counted,) = run_distributed(1, _calls_of_attention)
    assert OURS.attention[0] == pytest.approx(counted + 1, rel=0.1)
    share = OURS.attention[0] / OURS.dense_layer[0]
    assert OURS.attention[1] == pytest.approx(share * OURS.dense_layer[1], rel=0.1)
