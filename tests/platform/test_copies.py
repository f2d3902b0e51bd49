"""Copies to the device, for which the host does not wait."""

import pytest
import torch

from moe_parallel.copies import copied_to


def test_on_a_cpu_nothing_is_copied():
    x = torch.arange(3)
    assert copied_to(torch.device("cpu"), x) is x


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_gpu():
    device, x = torch.device("cuda"), torch.arange(2**20)
    copied_to(device, x)  # allocates pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = copied_to(device, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(copy.cpu(), x)
