"""Bytes counted by hand: the saved bytes, and the peak of the allocated bytes."""

import torch

from tools.bench.measurement import BenchContender, peak_bytes, saved_bytes

KIB = 1024
SCALARS = 64  # temporary bytes of numbers such as 2.0


def kib(amount: int) -> torch.Tensor:
    return torch.ones(amount * KIB // 4, requires_grad=True)


def test_each_storage_counts_once_and_parameters_do_not() -> None:
    x, w = kib(4), kib(4)
    product = BenchContender(
        "product", lambda: [x * w], {"x": x, "w": w}, frozenset({"w"}), (torch.ones(KIB),)
    )
    assert saved_bytes(product) == 4 * KIB  # x for the gradient of w; w is a parameter
    square = BenchContender(
        "square", lambda: [x[:512] * x[512:]], {"x": x}, upstream=(torch.ones(512),)
    )
    assert saved_bytes(square) == 4 * KIB  # two views of one storage


def test_the_peak_is_what_was_held_at_once() -> None:
    x = kib(1024)

    def forward() -> list[torch.Tensor]:
        a = x.detach() + 1  # 1 MiB, freed before the next
        del a
        b = x.detach() + 2
        return [b + 3]  # two at the same time

    peak = peak_bytes(BenchContender("sums", forward), "cpu")
    assert 2 * 1024 * KIB <= peak <= 2 * 1024 * KIB + SCALARS
