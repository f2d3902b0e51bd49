"""The time of a step by hand, where one thing at a time takes all of it."""

from dataclasses import replace

import pytest

from moe_parallel.plan.cluster import NODES, Cluster, Efficiency
from moe_parallel.plan.experts import PlannedExperts
from moe_parallel.plan.layout import Group, Layout
from moe_parallel.plan.messages import DISPATCH, Collective
from moe_parallel.plan.shape import Shape, swiglu_weights
from moe_parallel.plan.step_time import seconds_of, seconds_of_messages, step_time
from moe_parallel.plan.work import FP32, LINEAR, Work, planned_product, traffic

PERFECT = Efficiency(1, 1, 1, 1, 1, 1, 1)
CLUSTER = Cluster(replace(NODES["h100x8"], call_time=0), 2, PERFECT)
SHAPE = Shape((False,) * 8, 1024, 8, 8, 128, 4096, 32000, False, 2048, bf16=True)
LAYOUT = Layout(ranks=16, pp=4, micro_batch=1, global_batch=64, distributed_optimizer=True)


def test_a_product_takes_its_flops_or_its_traffic() -> None:
    heavy = Work("", "", LINEAR, 989e12, 2 * 989e12, 1, 1)
    assert seconds_of(heavy, SHAPE, CLUSTER) == (1, 2)
    assert seconds_of(replace(heavy, fp8=True), SHAPE, CLUSTER) == pytest.approx(
        (989 / 1979,) * 1 + (2 * 989 / 1979,)
    )
    assert seconds_of(traffic("", "", 3.35e12, 6.7e12), SHAPE, CLUSTER) == (1, 2)
    half = replace(CLUSTER, efficiency=replace(PERFECT, linear=0.5, memory=0.25))
    assert seconds_of(heavy, SHAPE, half) == (2, 4)
    assert seconds_of(traffic("", "", 3.35e12, 0), SHAPE, half) == (4, 0)


def test_a_message_takes_the_slower_of_its_links() -> None:
    def seconds(size: int, ranks: int, times: int = 1) -> float:
        message = Collective("", DISPATCH, "all-to-all", Group("", ranks, 1), size, times)
        return seconds_of_messages([message], CLUSTER, DISPATCH)

    assert seconds(450_000_000_000, 8) == 1
    assert seconds(15 * 50_000_000_000, 16) == 8  # 8 of 15 parts over the network
    assert seconds(7, 8, times=3) == pytest.approx(3 * NODES["h100x8"].link_latency)
    assert seconds(15, 16) == NODES["h100x8"].network_latency


def test_the_bubble() -> None:
    plain, virtual = (
        step_time(SHAPE, replace(LAYOUT, virtual=chunks), CLUSTER).parts for chunks in (1, 2)
    )
    busy = sum(plain[part] for part in ("attention", "dense layers", "output layer"))
    assert LAYOUT.micro_batches == 16
    assert plain["bubble"] == pytest.approx(busy * 3 / 16)
    assert virtual["bubble"] == pytest.approx(plain["bubble"] / 2)


def test_recomputation_repeats_the_layers_only() -> None:
    once, twice = (
        step_time(SHAPE, Layout(ranks=1, global_batch=4, recompute=recompute), CLUSTER).parts
        for recompute in (False, True)
    )
    assert "recompute" not in once
    assert 0 < twice["recompute"] < once["attention"] + once["dense layers"]


def test_overlap_hides_messages() -> None:
    shown = step_time(SHAPE, LAYOUT, CLUSTER)
    hides = replace(LAYOUT, overlap_grad_reduce=True, overlap_param_gather=True)
    hidden = step_time(SHAPE, hides, CLUSTER)
    assert shown.parts["gradients"] > hidden.parts.get("gradients", 0)
    assert shown.tokens_per_gpu < hidden.tokens_per_gpu
    tokens = 64 * 2048
    assert hidden.tokens_per_gpu == pytest.approx(tokens / hidden.seconds / 16)


@pytest.mark.parametrize("recompute", [False, True])
def test_small_kernels_wait_for_the_host(recompute: bool) -> None:
    """11 + 22 calls of a dense layer take longer than its few FLOPs, which they then hide.

    With recomputation there are 11 more, and the FLOPs of another forward pass.
    """
    small = replace(SHAPE, seq_length=16)
    layout = Layout(ranks=1, micro_batch=1, global_batch=4, recompute=recompute)
    parts = step_time(small, layout, CLUSTER).parts
    waiting = step_time(small, layout, replace(CLUSTER, node=NODES["h100x8"])).parts
    layers = 4 * 8 * (11 * (2 if recompute else 1) + 22) * NODES["h100x8"].call_time
    busy = parts["attention"] + parts["dense layers"] + parts.get("recompute", 0.0)
    assert "host" not in parts
    assert waiting["host"] == pytest.approx(layers - busy)
    assert waiting["attention"] == parts["attention"]


def test_products_in_fp32_do_not_use_tensor_cores() -> None:
    router = Work("", "", FP32, 67e12, 0, 1, 1)
    assert seconds_of(router, SHAPE, CLUSTER)[0] == 1


def test_a_narrow_product_takes_longer_than_its_flops() -> None:
    """Both fill 132 multiprocessors with whole tiles; 160 numbers are added to the depth."""
    rows = 132 * 256
    wide, narrow = (planned_product("", "", LINEAR, (rows, k, 2**25 // k), 2) for k in (4096, 256))
    assert wide.flops == narrow.flops == 2 * rows * 2**25
    ratio = seconds_of(narrow, SHAPE, CLUSTER)[0] / seconds_of(wide, SHAPE, CLUSTER)[0]
    assert ratio == pytest.approx(((256 + 160) / 256) / ((4096 + 160) / 4096))


def test_the_slowest_stage_of_unlike_layers_is_found() -> None:
    """The third of four stages has the experts."""
    experts = PlannedExperts(8, 2, 4096, swiglu_weights(1024, 8, 4096))
    moe_layers = (False,) * 4 + (True,) * 2 + (False,) * 2
    shape = replace(SHAPE, moe_layers=moe_layers, vocabulary=512, experts=experts)
    parts = step_time(shape, LAYOUT, CLUSTER).parts
    assert parts["experts"] > 0
    assert LAYOUT.unlike_stages(moe_layers) == range(4)
    assert LAYOUT.unlike_stages((True,) * 8) == [0, 1, 3]
