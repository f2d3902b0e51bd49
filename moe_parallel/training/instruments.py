"""The machine at work, for the `machine` of a metrics record: rates, and the readings of gauges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.model.flops import token_flops
from moe_parallel.platform.device import device
from moe_parallel.telemetry.monitor import Gauge, GpuGauge, HostGauge, Monitor, over_ranks

#: Dense bf16 TFLOP/s of NVIDIA's data sheets, by the beginning of the name; the longest counts.
BF16_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA A800": 312.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200": 989.0,
    "NVIDIA B200": 2250.0,
}


class Instruments:
    """The gauges of this rank, and the formulas of its speed. Make it by `open_instruments`.

    Attributes:
        warnings: gauges that this rank lacks, and why.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        """`vocab_size`: of the tokenizer."""
        self.warnings: list[str] = []
        self._padded_vocab_size = config.padded_vocab_size(vocab_size)
        self._peak = config.logging.peak_tflops or peak_tflops(config.training.bf16)
        seconds = config.logging.machine_sample_seconds
        self._samples = seconds is not None
        self.monitor = Monitor(self._gauges() if self._samples else [], seconds or 1.0)

    def record(
        self, config: Config, tokens_per_second: float, layers: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """The `machine` of a record, over the time since the last call. Collective.

        Args:
            config: of the model that was trained in this time.
            tokens_per_second: of all ranks.
            layers: the statistics of its layers; see `RoutingTotals.summaries`.
        """
        flops = token_flops(config, self._padded_vocab_size, computed_choices(layers))
        rate = flops.training * tokens_per_second / dist.get_world_size() / 1e12
        record = {"tflops_per_device": rate}
        if self._peak is not None:
            record["mfu"] = rate / self._peak
        if self._samples:
            record |= over_ranks(self.monitor.take())
        if "gpu_watts" in record:
            record["joules_per_token"] = record["gpu_watts"] / tokens_per_second
        return record

    def _gauges(self) -> list[Gauge]:
        gauges: list[Gauge] = [HostGauge()]
        if torch.cuda.is_available():
            uuid = f"GPU-{torch.cuda.get_device_properties(device()).uuid}"
            try:
                gauges.append(GpuGauge(uuid))
            except (InputError, OSError) as error:  # a run does not need its telemetry
                self.warnings.append(f"the GPU is not monitored: {error}")
        return gauges


@contextlib.contextmanager
def open_instruments(config: Config, vocab_size: int) -> Iterator[Instruments]:
    """Instruments that read in the background inside this context."""
    instruments = Instruments(config, vocab_size)
    with instruments.monitor:
        yield instruments


def computed_choices(layers: Sequence[Mapping[str, Any]]) -> float:
    """The mean number of experts that computed a token, without dropped choices; 0: no layers."""
    if not layers:
        return 0.0
    kept = [
        layer["experts_per_token"]
        * (1 - layer["tokens_dropped"] / max(1, sum(layer["tokens_per_expert"])))
        for layer in layers
    ]
    return float(sum(kept) / len(kept))


def peak_tflops(bf16: bool) -> float | None:
    """The most TFLOP/s of this process's device; None if not known, as on a CPU or in fp32."""
    if not (bf16 and torch.cuda.is_available()):
        return None
    name = torch.cuda.get_device_name()
    known = [each for each in BF16_TFLOPS if name.startswith(each)]
    return BF16_TFLOPS[max(known, key=len)] if known else None
