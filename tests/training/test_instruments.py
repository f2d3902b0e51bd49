"""The machine's rates and gauges, the times of all ranks, and profiles."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.autograd import DeviceType

from moe_parallel.config import make_config
from moe_parallel.model import forward
from moe_parallel.model.flops import token_flops
from moe_parallel.telemetry.metrics import read_metrics
from moe_parallel.telemetry.progress import Clock
from moe_parallel.training import instruments as instruments_module
from moe_parallel.training.instruments import peak_tflops, summarize
from tests.data.small_text import small_bpe
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, pretrain_here, small_data

PEAK = 0.25  # TFLOP/s


def _run(path: Path, more: dict[str, Any]) -> tuple[str, list[bool]]:
    options = SMALL | small_data(path) | {"save": path / "run"} | more
    ((_, output),) = pretrain_here([options])
    return output, [name in sys.modules for name in ("pynvml", "nvidia_ml_py")]


def _machine(path: Path) -> list[dict[str, Any]]:
    lines = (path / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "machine" in record]


@pytest.mark.full
@pytest.mark.parametrize("system", [{}, AOE], ids=["top-k", "AoE"])
def test_the_rates_of_a_run(tmp_path: Path, system: dict[str, Any]) -> None:
    more = system | {"peak_tflops": PEAK, "machine_sample_seconds": 0.001}
    (output, imported), _ = run_distributed(2, _run, tmp_path, more)
    config = make_config(SMALL | system)
    vocab_size = config.padded_vocab_size(small_bpe().vocab_size)
    flops = token_flops(config, vocab_size, choices_per_token=2).training
    records = _machine(tmp_path)
    assert len(records) == SMALL["train_iters"]
    for record in records:
        rate = flops * record["tokens_per_second"] / 2 / 1e12
        assert record["machine"]["tflops_per_device"] == pytest.approx(rate)
        assert record["machine"]["mfu"] == pytest.approx(rate / PEAK)
        assert set(record["machine"]) == {"tflops_per_device", "mfu"}
    assert " tokens/s | MFU " in output
    assert imported == [False, False]  # there is no GPU


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks(name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops(bf16=True) is None or torch.cuda.is_available()
    gpu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: name)
    monkeypatch.setattr(instruments_module, "torch", SimpleNamespace(cuda=gpu))
    assert peak_tflops(bf16=True) == tflops
    assert peak_tflops(bf16=False) is None


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


def _records(folder, before):
    options = SMALL | RUN | small_data(folder) | {"save": folder / "run"}
    ends = run_distributed(2, pretrain_here, [options], before)
    printed = ends[0][0][1]
    return read_metrics(folder / "run" / "metrics.jsonl"), printed


@pytest.fixture(scope="module")
def slow_host(tmp_path_factory):
    return _records(tmp_path_factory.mktemp("host"), _slow_host)


@pytest.mark.full
def test_a_slow_host_is_named(slow_host):
    records, printed = slow_host
    for record in records:
        ranks = record["ranks"]
        slowest = ranks["slowest"]
        assert (slowest["rank"], slowest["phase"], slowest["cause"]) == (SLOW, "forward", "host")
        assert ranks["own_seconds"] == [MICRO_BATCHES * OWN, MICRO_BATCHES * OWN_OF_SLOW]
        # The other rank waits for it in a collective.
        assert ranks["dispatch_seconds"] == [MICRO_BATCHES * (OWN_OF_SLOW - OWN), 0]
        assert sum(ranks["rows"]) == TOKENS * CHOICES * LAYERS
    (line,) = [line for line in printed.splitlines() if "as slow as its peers" in line]
    assert line.startswith(f"rank {SLOW} on ") and line.endswith(": its host is slow")


STEPS = {"profile": True, "profile_step_start": 2, "profile_step_end": 4}
SHORT = {"train_iters": 5, "lr_warmup_iters": 1, "eval_iters": 0, "log_interval": 1}


def event(
    name: str, begin: float, end: float, *, kernel: bool = False, annotation: bool = False
) -> SimpleNamespace:
    """An event of torch's profiler, with times in microseconds."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=begin, end=end),
        device_type=DeviceType.CUDA if kernel else DeviceType.CPU,
        is_user_annotation=annotation,
    )


@pytest.mark.full
def test_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    options = SMALL | small_data(tmp_path) | SHORT | STEPS | {"save": tmp_path / "run"}
    run_distributed(1, pretrain_here, [options])
    profile = tmp_path / "run" / "profile" / "iter_0000002_rank0"
    with gzip.open(f"{profile}.json.gz") as trace:
        names = [each.get("name", "") for each in json.load(trace)["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2  # once in a step
    text = Path(f"{profile}.txt").read_text()
    assert text.startswith("profile of 2 steps: ") and "aten::mm" in text


def test_what_the_device_and_the_host_did():
    events = [
        event("cudaLaunchKernel", 0, 10),
        event("cudaMemcpyAsync", 20, 25),
        event("cudaStreamSynchronize", 100, 600),
        event("cudaStreamSynchronize", 700, 1200),
        event("aten::mm", 0, 50),
        event("sgemm", 1000, 3000, kernel=True),
        event("Memcpy HtoD", 2000, 4000, kernel=True),  # at the same time on another stream
        event("sgemm", 9000, 10000, kernel=True),
        event("Optimizer.step#AdamW.step", 3000, 10000, kernel=True, annotation=True),
    ]
    assert summarize(events, seconds=0.02, steps=2) == (
        "profile of 2 steps: 10.0 ms a step; the device works 2.0 ms of them (20%); "
        "kernels and copies a step: 1; the host waits 0.5 ms in 1 calls"
    )
