"""Bytes by plan equal those of a built model, its gradient buffers, its optimizer, its schedule."""

from typing import Any

import pytest
import torch

from moe_parallel.parallel import destroy_groups
from moe_parallel.plan.layout import Layout, layout_of
from moe_parallel.plan.memory import chunks_in_flight, memory_of_stage
from moe_parallel.plan.weights import Weight, buckets
from moe_parallel.training.optimizer_parts import optimizer_parts
from tests.distributed import run_distributed
from tests.plan.counting import Kept
from tests.plan.running import (
    AOE,
    AOE_THRESHOLD,
    CONSTANT,
    DENSE,
    FREE,
    GATED,
    HASH,
    RELU,
    ROUTING_FREE,
    THRESHOLD,
    TOP_P,
    UOE,
    Options,
    batches,
    config_of,
    engine_of,
    factors_stay_bf16,
    planned_shape,
)

Sizes = tuple[int, int, int, int]  # bytes of weights, gradients, optimizer, other state


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _built(engine: Any) -> Sizes:
    for part in optimizer_parts(engine.optimizer):
        part.init_state_fn(part.optimizer)
    weights = [weight for chunk in engine.chunks for weight in chunk.parameters()]
    gradients = [
        buffer.grad_data
        for chunk in engine.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    held = {w.untyped_storage().data_ptr() for w in weights}
    states = 0
    for part in optimizer_parts(engine.optimizer):
        for weight, state in part.optimizer.state.items():
            numbers = [t for name, t in state.items() if name != "step"]
            if weight.untyped_storage().data_ptr() not in held:
                numbers.append(weight)  # the fp32 copy of a bf16 weight
            states += sum(t.numel() * t.element_size() for t in numbers)
    buffers = [buffer for layer in engine._expert_layers for buffer in layer.buffers()]
    return _bytes(weights), _bytes(gradients), states, _bytes(buffers)


def _sizes(world_size: int, cases: dict[str, Options]) -> dict[str, tuple[Sizes, Sizes]]:
    """By case: (by plan, built) on this rank."""
    found = {}
    for name, options in cases.items():
        config = config_of({"use_distributed_optimizer": True} | options)
        engine = engine_of(config)
        shape, layout = planned_shape(config), layout_of(config, world_size)
        groups = engine.groups
        number = groups.dp.rank() * groups.cp.size() + groups.cp.rank()
        plan = memory_of_stage(shape, layout, groups.pp.rank(), number)
        planned = (plan.weights, plan.gradients, plan.optimizer, plan.state)
        found[name] = (planned, _built(engine))
        destroy_groups()
    return found


EP, TP = {"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
SP, PP = TP | {"sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
VIRTUAL = PP | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}
BF16 = {"bf16": True}
ODD = {"hidden_size": 40, "ffn_hidden_size": 10, "moe_ffn_hidden_size": 18}  # padding everywhere


def test_on_one_rank() -> None:
    cases = {
        "fp32": {},
        "fp32, plain": PLAIN,
        "bf16": BF16,
        "bf16, plain": BF16 | PLAIN,
        "aoe": AOE | BF16,
        "odd sizes": ODD | BF16,
        "untied": {"untie_embeddings_and_output_weights": True},
        "shared, gated": GATED | BF16,
        "large router, W_g of two factors": {"moe_router_hidden_size": 24}
        | {"moe_gate_low_rank_size": 16},
    }
    for name, (planned, built) in run_distributed(1, _sizes, 1, cases)[0].items():
        assert planned == built, name


def test_newer_systems_on_one_rank() -> None:
    bias = {"moe_router_enable_expert_bias": True}
    cases = {
        "relu": RELU,
        "threshold": THRESHOLD,
        "aoe_threshold, by sign": AOE_THRESHOLD | {"moe_threshold_update": "sign"},
        "routing_free, shared": ROUTING_FREE | GATED,
        "uoe": UOE,
        "hash": HASH,
        "constant, shared, odd sizes": CONSTANT | GATED | ODD,
        "aoe, free": AOE | FREE,
        "aoe, constant": AOE | CONSTANT,
        "top_p with a target": TOP_P | {"moe_top_p_target_experts": 2.0},
        "bias by quantiles": bias | {"moe_router_bias_update": "quantile"},
        "bias by id": bias | {"moe_router_bias_update": "id"},
    }
    cases = {name: BF16 | options for name, options in cases.items()}
    for name, (planned, built) in run_distributed(1, _sizes, 1, cases)[0].items():
        assert planned == built, name


QUICK = {
    "dp, odd sizes": ODD | BF16 | OVERLAP,
    "ep, buckets": EP | BF16 | OVERLAP,
    "tp and ep": SP | EP | BF16 | {"expert_tensor_parallel_size": 1},
    "pp, virtual": VIRTUAL | BF16,
    "cp, odd sizes": {"context_parallel_size": 2} | ODD | BF16 | OVERLAP,
    "shared, gated, sp, odd sizes": GATED | SP | BF16 | ODD | OVERLAP,
    "aoe, etp, gathered": AOE | SP | BF16 | {"aoe_gather_w_down": True},
}
NEWER = {
    "relu, ep": RELU | EP | BF16,
    "routing_free, sp, odd sizes": ROUTING_FREE | SP | BF16 | ODD | OVERLAP,
    "aoe_threshold, etp, gathered": AOE_THRESHOLD | SP | BF16 | {"aoe_gather_w_down": True},
    "uoe, ep, buckets": UOE | EP | BF16 | OVERLAP,
    "hash, pp": HASH | PP | BF16,
    "constant, dp, odd sizes": CONSTANT | ODD | BF16 | OVERLAP,
    "aoe, free, sp": AOE | FREE | SP | BF16,
}
MORE = {
    "dp": BF16,
    "dp, fp32": {},
    "dp, buckets": BF16 | OVERLAP,
    "ep": EP | BF16,
    "ep, plain": EP | PLAIN,
    "sp": SP | BF16,
    "pp": PP | BF16,
    "pp, plain": PP | PLAIN,
    "pp, untied": PP | {"untie_embeddings_and_output_weights": True},
    "aoe, ep": AOE | EP | BF16,
    "aoe, ep, gathered": AOE | EP | BF16 | {"aoe_gather_w_down": True},
}


@pytest.mark.parametrize(
    "cases",
    [
        QUICK,
        pytest.param(NEWER, marks=pytest.mark.full),
        pytest.param(MORE, marks=pytest.mark.full),
    ],
    ids=["quick", "newer systems", "more"],
)
def test_on_two_ranks(cases: dict[str, Options]) -> None:
    for of_rank in run_distributed(2, _sizes, 2, cases):
        for name, (planned, built) in of_rank.items():
            assert planned == built, name


@pytest.mark.full
def test_on_four_ranks() -> None:
    cases = {
        "ep and edp": EP | BF16,
        "pp and ep": PP | EP | BF16 | OVERLAP,
        "tp, pp, aoe": SP | PP | AOE | BF16 | {"aoe_gather_w_down": True},
        "tp, ep, odd": SP | EP | BF16 | {"expert_tensor_parallel_size": 1, "hidden_size": 72},
    }
    for of_rank in run_distributed(4, _sizes, 4, cases):
        for name, (planned, built) in of_rank.items():
            assert planned == built, name


def _most_kept(world_size: int, options: Options) -> tuple[int, int]:
    """(by plan, most bytes that autograd keeps at the end of a forward pass of a chunk)."""
    config = config_of(options)
    engine = engine_of(config)
    others = [t for c in engine.chunks for t in (*c.module.parameters(), *c.module.buffers())]
    kept, most = Kept(others), 0

    def note(*_: Any) -> None:
        nonlocal most
        most = max(most, kept.nbytes)

    for chunk in engine.chunks:
        chunk.register_forward_hook(note)
    with factors_stay_bf16(), kept.counting():
        engine.step(batches(config))
    layout = layout_of(config, world_size)
    stage = engine.groups.pp.rank()
    planned = memory_of_stage(planned_shape(config), layout, stage).activations
    destroy_groups()
    return planned, most


@pytest.mark.parametrize(
    "options", [PP, VIRTUAL | {"global_batch_size": 16}], ids=["1f1b", "virtual"]
)
def test_micro_batches_in_flight(options: Options) -> None:
    for planned, kept in run_distributed(2, _most_kept, 2, BF16 | options):
        assert planned == kept, (planned, kept)


def test_chunks_in_flight_by_hand() -> None:
    def counts(stage: int, **sizes: int) -> set[tuple[int, ...]]:
        return chunks_in_flight(Layout(ranks=sizes["pp"], global_batch=8, **sizes), stage)

    assert [max(counts(stage, pp=4)) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert counts(0, pp=1) == {(1,)}
    # Stage 0 of 2 with 2 chunks: forward passes 1 1 2 2 1, and then a backward pass 2 before each.
    assert counts(0, pp=2, virtual=2) >= {(1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (4, 1)}
    assert max(sum(each) for each in counts(0, pp=2, virtual=2)) == 5
    assert max(sum(each) for each in counts(1, pp=2, virtual=2)) == 3


def test_buckets_by_hand() -> None:
    weights = [Weight("a", "", 100), Weight("b", "", 130), Weight("c", "", 10)]
    # In reverse order: c at 0..10, b at 64..194, which ends a bucket at 256, then a at 256..356.
    found = buckets(weights, ranks=2, distributed=True, least=100)
    assert [(b.start, b.end, b.weights) for b in found] == [
        (0, 256, ((0, 10), (64, 194))),
        (256, 384, ((256, 356),)),
    ]
    assert [found[0].owned(rank, 2) for rank in range(2)] == [10 + 64, 66]
    assert [b.size for b in buckets(weights, ranks=2, distributed=False, least=None)] == [240]


def test_dense_model() -> None:
    config = config_of(DENSE)
    shape = planned_shape(config)
    plan = memory_of_stage(shape, Layout(ranks=1, micro_batch=4, global_batch=4), 0)
    d, kv, f, layers, vocabulary = 64, 32, 160, 2, 112
    numbers = layers * (2 * d + 2 * d * d + 2 * d * kv + 3 * d * f) + d + vocabulary * d
    assert (plan.weights, plan.gradients, plan.optimizer) == (4 * numbers, 4 * numbers, 8 * numbers)
