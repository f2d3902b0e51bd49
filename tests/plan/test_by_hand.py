"""Links, buckets, schedules and times worked by hand."""

from dataclasses import replace

import pytest

from moe_parallel.config import make_config
from moe_parallel.plan.cluster import NODES, Cluster, Efficiency
from moe_parallel.plan.layout import Group, Layout
from moe_parallel.plan.measure import EXPERTS, LINEAR, OTHER, Part, Parts, Weight
from moe_parallel.plan.stage import (
    DISPATCH,
    Collective,
    Model,
    Wire,
    buckets,
    chunks_in_flight,
    memory_of_stage,
    messages_of_stage,
)
from moe_parallel.plan.step_time import seconds_of_messages, step_time

PERFECT = Efficiency(1, 1, 1, 1, 1, 1, 1)
CLUSTER = Cluster(replace(NODES["h100x8"], call_time=0), 2, PERFECT)


def _wire(kind: str, size: int, stride: int, nbytes: int = 1600) -> Wire:
    return Collective("", kind, Group("", size, stride), nbytes, 1).wire(node_size=8)


def test_links() -> None:
    # Ranks 6 to 11: two on the first node, four on the second; ranks 0 to 11: eight, and four.
    assert [Group("", size, 1).on_node(8) for size in (6, 12, 16)] == [2, 4, 8]
    assert [Group("", *group).on_node(8) for group in ((16, 2), (4, 8), (3, 4))] == [4, 1, 1]
    # 16 ranks on 2 nodes: 7 of 15 parts of an all-to-all stay on the node, 8 leave it.
    assert _wire("all-to-all", 16, 1, 1500) == Wire(700, 800)
    assert _wire("all-to-all", 8, 1, 700) == Wire(700, 0)
    # A ring over 2 nodes: 15/16 of the bytes pass each link; 8 ranks share the node's border.
    assert _wire("reduce-scatter", 16, 1) == Wire(1500, 1500 / 8)
    assert _wire("all-reduce", 16, 1) == Wire(3000, 3000 / 8)
    assert _wire("all-gather", 16, 1, 100) == Wire(1500, 1500 / 8)
    # Ranks 8 apart are on different nodes; each has the network card of its own GPU.
    assert _wire("reduce-scatter", 4, 8) == Wire(0, 1200)
    assert _wire("send", 4, 8) == Wire(0, 1600)
    assert _wire("send", 2, 4) == Wire(1600, 0)


def test_chunks_in_flight() -> None:
    def counts(stage: int, **sizes: int) -> set[tuple[int, ...]]:
        return chunks_in_flight(Layout(ranks=sizes["pp"], global_batch=8, **sizes), stage)

    assert [max(counts(stage, pp=4)) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert counts(0, pp=1) == {(1,)}
    # Stage 0 of 2 with 2 chunks: forward passes 1 1 2 2 1, and then a backward pass 2 before each.
    assert counts(0, pp=2, virtual=2) >= {(1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (4, 1)}
    assert max(sum(each) for each in counts(0, pp=2, virtual=2)) == 5
    assert max(sum(each) for each in counts(1, pp=2, virtual=2)) == 3


def test_buckets() -> None:
    weights = [(100, False), (130, False), (10, False)]
    # In reverse order: 10 at 0..10, 130 at 64..194, which ends a bucket at 256, then at 256..356.
    found = buckets(weights, ranks=2, distributed=True, least=100)
    assert [(b.start, b.end, b.weights) for b in found] == [
        (0, 256, ((0, 10), (64, 194))),
        (256, 384, ((256, 356),)),
    ]
    assert [found[0].owned(rank, 2) for rank in range(2)] == [10 + 64, 66]
    assert [b.size for b in buckets(weights, ranks=2, distributed=False, least=None)] == [240]


def _model(layout: Layout, **options: object) -> Model:
    """Four dense layers of 989 TFLOP forward and twice that backward; the ends do nothing."""
    config = make_config({"num_layers": 4, "num_experts": None, "bf16": True} | options)
    layer = Part(
        [Weight("w", 1280, False, False, matrices=(2, 80, 8))],
        kept=7,
        forward=[(LINEAR, 989e12, 1)],
        backward=[(LINEAR, 2 * 989e12, 1)],
    )
    return Model(config, layout, Parts(Part(), 3, {False: layer}, Part()), ())


def test_an_operator_takes_its_flops_or_its_bytes() -> None:
    layout = Layout(ranks=1, global_batch=2)
    model = _model(layout)
    seconds = step_time(model, CLUSTER, 128, None).parts
    assert seconds[LINEAR] == pytest.approx(2 * 4 * (1 + 2))
    half = replace(CLUSTER, efficiency=replace(PERFECT, linear=0.5, memory=0.25))
    assert step_time(model, half, 128, None).parts[LINEAR] == pytest.approx(48)
    model.parts.layers[False].forward[:] = [(OTHER, 0, round(3.35e12))]
    assert step_time(model, CLUSTER, 128, None).parts[OTHER] == pytest.approx(2 * 4)
    waits = replace(CLUSTER, node=replace(CLUSTER.node, call_time=5.0))
    model.parts.layers[False].backward[:] = [(EXPERTS, 989e12, 1), (EXPERTS, 989e12, 1)]
    # A layer forward: a call of 5 s for 1 s of work; backward: two calls for 2 s.
    assert step_time(model, waits, 128, None).parts["host"] == pytest.approx(2 * 4 * (4 + 8))
    # The optimizer reads the gradient, and reads and writes two moments and a master weight.
    moved = 4 * 1280 * (4 + 2 * 8 + 2 * 4 + 2)
    assert seconds["optimizer"] == pytest.approx(moved / 3.35e12)


def test_muon_moves_less_and_multiplies() -> None:
    """Two matrices of 80 x 8: X X^T and B X of 2 x 8 x 8 x 80 FLOPs each, A A of 2 x 8 x 8 x 8."""
    model = _model(Layout(ranks=1, global_batch=2), optimizer="muon", muon_num_ns_steps=3)
    flops = 4 * 2 * 3 * (2 * 10_240 + 1_024)
    moved = 4 * 1280 * (4 + 2 * 4 + 2 * 4 + 2)
    seconds = step_time(model, CLUSTER, 128, None).parts["optimizer"]
    assert seconds == pytest.approx(moved / 3.35e12 + flops / 989e12)


def test_the_bubble() -> None:
    layout = Layout(ranks=4, pp=4, micro_batch=1, global_batch=16)
    plain, virtual = (
        step_time(_model(replace(layout, pp=pp, virtual=v)), CLUSTER, 128, None).parts
        for pp, v in ((4, 1), (2, 2))
    )
    assert plain["bubble"] == pytest.approx(16 * 3 * 3 / 16)
    # Two stages on four ranks are two data-parallel ones, with 8 micro-batches of 2 layers each.
    assert virtual["bubble"] == pytest.approx(8 * 2 * 3 * 1 / (2 * 8))


def test_micro_batches_in_flight_share_what_is_kept_once() -> None:
    layout = Layout(ranks=4, pp=4, global_batch=8)
    kept = [memory_of_stage(_model(layout), stage).activations for stage in range(4)]
    assert kept == [3 + 4 * 7, 3 + 3 * 7, 3 + 2 * 7, 3 + 7]


def test_a_message_takes_the_slower_of_its_links() -> None:
    def seconds(size: int, ranks: int, times: int = 1) -> float:
        message = Collective(DISPATCH, "all-to-all", Group("", ranks, 1), size, times)
        return seconds_of_messages([message], CLUSTER, DISPATCH)

    assert seconds(450_000_000_000, 8) == 1
    assert seconds(15 * 50_000_000_000, 16) == 8  # 8 of 15 parts over the network
    assert seconds(7, 8, times=3) == pytest.approx(3 * NODES["h100x8"].link_latency)
    assert seconds(15, 16) == NODES["h100x8"].network_latency


def test_nothing_is_sent_alone() -> None:
    layout = Layout(ranks=1, global_batch=2, distributed_optimizer=True)
    assert messages_of_stage(_model(layout), 0) == []
