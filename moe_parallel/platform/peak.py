"""The most floating-point operations that a device can do in a second."""

from __future__ import annotations

import torch

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


def peak_tflops(bf16: bool) -> float | None:
    """Of this process's device; None if it is not known, as on a CPU or in fp32."""
    if not (bf16 and torch.cuda.is_available()):
        return None
    name = torch.cuda.get_device_name()
    known = [each for each in BF16_TFLOPS if name.startswith(each)]
    return BF16_TFLOPS[max(known, key=len)] if known else None
