"""Runs on two ranks, of which one is on a slow host or has the experts that all tokens choose."""

from dataclasses import replace

import pytest
import torch
from torch import distributed as dist

from moe_parallel.layers.routed import RoutedLayer
from moe_parallel.model import forward
from moe_parallel.telemetry.metrics import TIMING, read_metrics
from moe_parallel.telemetry.progress import Clock
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data

RUN = {
    "train_iters": 10,
    "log_interval": 2,
    "expert_model_parallel_size": 2,
    "eval_iters": 0,
}
TOKENS = SMALL["global_batch_size"] * SMALL["seq_length"]
LAYERS, CHOICES = SMALL["num_layers"], 2
SLOW = 1
MICRO_BATCHES = 2  # of a step, on each rank
OWN, OWN_OF_SLOW = 1.0, 3.0  # seconds of a micro-batch
OF_ROW = 0.01  # seconds


class _Time:
    """The clock of a rank's phases: it stands still but for what a test adds.

    In an exchange every rank waits until the last one has come.
    """

    now = 0.0

    @classmethod
    def install(cls):
        Clock.read = lambda clock: cls.now
        exchange = dist.all_to_all_single

        def exchange_and_wait(*args, group, **more):
            work = exchange(*args, group=group, **more)
            latest = torch.tensor(cls.now, dtype=torch.float64)
            dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
            cls.now = latest.item()
            return work

        dist.all_to_all_single = exchange_and_wait


def _slow_host():
    plain = forward.own_documents

    def slowly(*args):
        _Time.now += OWN_OF_SLOW if dist.get_rank() == SLOW else OWN
        return plain(*args)

    _Time.install()
    forward.own_documents = slowly


def _hot_experts():
    """All tokens choose the experts of one rank: 2 and 3 of 4. Each row takes its time."""
    plain, compute = RoutedLayer.choose, RoutedLayer.compute

    def choose(layer, *args):
        _Time.now += OWN
        choices = plain(layer, *args)
        hot = torch.tensor([2, 3]).expand_as(choices.experts_TK).contiguous()
        return replace(choices, experts_TK=hot)

    def compute_slowly(layer, rows):
        _Time.now += OF_ROW * len(rows.x_MD)
        return compute(layer, rows)

    _Time.install()
    RoutedLayer.choose, RoutedLayer.compute = choose, compute_slowly


def _records(folder, before):
    options = SMALL | RUN | small_data(folder) | {"save": folder / "run"}
    ends = run_distributed(2, pretrain_here, [options], before)
    printed = ends[0][0][1]
    return read_metrics(folder / "run" / "metrics.jsonl"), printed


@pytest.fixture(scope="module")
def slow_host(tmp_path_factory):
    return _records(tmp_path_factory.mktemp("host"), _slow_host)


@pytest.fixture(scope="module")
def hot_experts(tmp_path_factory):
    return _records(tmp_path_factory.mktemp("experts"), _hot_experts)


@pytest.mark.full
def test_a_slow_host_is_named(slow_host):
    records, _ = slow_host
    for record in records:
        ranks = record["ranks"]
        slowest = ranks["slowest"]
        assert (slowest["rank"], slowest["phase"], slowest["cause"]) == (SLOW, "forward", "host")
        assert ranks["own_seconds"] == [MICRO_BATCHES * OWN, MICRO_BATCHES * OWN_OF_SLOW]
        # The other rank waits for it in a collective.
        assert ranks["dispatch_seconds"] == [MICRO_BATCHES * (OWN_OF_SLOW - OWN), 0]
        assert sum(ranks["rows"]) == TOKENS * CHOICES * LAYERS


@pytest.mark.full
def test_it_is_told_in_one_line(slow_host):
    _, printed = slow_host
    (line,) = [line for line in printed.splitlines() if "as slow as its peers" in line]
    assert line.startswith(f"rank {SLOW} on ") and line.endswith(": its host is slow")


@pytest.mark.full
def test_hot_experts_are_told_apart(hot_experts):
    records, _ = hot_experts
    for record in records:
        slowest = record["ranks"]["slowest"]
        assert (slowest["rank"], slowest["cause"]) == (SLOW, "tokens")
        assert record["ranks"]["rows"] == [0, TOKENS * CHOICES * LAYERS]
        assert record["rank_load"]["overload"] == 2.0
        assert record["rank_load"]["expert_parallel_rank"] == SLOW


@pytest.mark.full
def test_only_the_load_is_the_same_in_every_run(slow_host):
    record = slow_host[0][0]
    assert "ranks" in TIMING and "rank_load" not in TIMING
    loads = [
        sum(layer["tokens_per_expert"][first : first + 2]) / (TOKENS * CHOICES)  # in two steps
        for layer in record["layers"]
        for first in (0, 2)
    ]
    assert record["rank_load"]["overload"] == max(loads)
    assert record["rank_load"]["p50"] == sorted(loads)[1]
