"""The choice of the device and the backend."""

import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.platform.device import choose_backend, default_backend, device, peak_memory
from tests.distributed import run_distributed


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


def test_without_cuda(no_cuda):
    assert device() == torch.device("cpu")
    assert default_backend() == choose_backend(None) == choose_backend("gloo") == "gloo"


def _peaks() -> tuple[int, int, int, int]:
    before = peak_memory()  # of a new process: that of the tests may be gigabytes
    held = torch.ones(before // 4 + 2**20)  # more than that, and written
    held_bytes = held.numel() * held.element_size()
    during = peak_memory()
    del held
    return before, held_bytes, during, peak_memory()


def test_peak_memory_grows_with_what_is_held():
    ((before, held, during, after),) = run_distributed(1, _peaks)
    assert during >= held > before
    assert after >= held


def test_peak_memory_of_a_gpu(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    assert peak_memory() == 123


def test_with_cuda(cuda):
    assert device() == torch.device("cuda", 3)
    assert default_backend() == choose_backend(None) == choose_backend("nccl") == "nccl"


def test_nccl_without_cuda_is_refused(no_cuda):
    with pytest.raises(InputError, match="--distributed-backend nccl .*--distributed-backend gloo"):
        choose_backend("nccl")


def test_an_unknown_backend_is_refused(cuda):
    with pytest.raises(InputError, match="--distributed-backend mpi .*gloo, nccl"):
        choose_backend("mpi")
