"""The `machine` of a record: rates of a run, the peak of a device, and no thread that stays."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.model.flops import token_flops
from moe_parallel.training import instruments as instruments_module
from moe_parallel.training.instruments import (
    Instruments,
    computed_choices,
    peak_tflops,
)
from tests.data.small_text import small_bpe
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, pretrain_here, small_data

PEAK = 0.25  # TFLOP/s


def _layer(counts: list[int], tokens: int, dropped: int = 0) -> dict[str, Any]:
    return {
        "tokens_per_expert": counts,
        "experts_per_token": sum(counts) / tokens,
        "tokens_dropped": dropped,
    }


def test_choices_that_were_computed() -> None:
    assert computed_choices([]) == 0
    assert computed_choices([_layer([6, 2], 4)]) == 2
    assert computed_choices([_layer([6, 2], 4, dropped=2), _layer([4, 8], 4)]) == 2.25


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
        assert "joules_per_token" not in record["machine"]
    assert any("host_memory_percent" in record["machine"] for record in records)
    assert " tokens/s | MFU " in output
    assert imported == [False, False]  # there is no GPU


def test_without_a_peak_or_readings(tmp_path: Path) -> None:
    ((output, _),) = run_distributed(1, _run, tmp_path, {"machine_sample_seconds": "none"})
    assert all(set(record["machine"]) == {"tflops_per_device"} for record in _machine(tmp_path))
    assert "MFU" not in output


def _joules() -> dict[str, float]:
    """The record of a rank whose GPU draws 500 W."""
    instruments_module.over_ranks = lambda means: {"gpu_watts": 500.0}
    return Instruments(make_config({}), 100).record(make_config({}), 250.0, [])


def test_joules_of_a_token() -> None:
    (record,) = run_distributed(1, _joules)
    assert record["joules_per_token"] == 2.0


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
