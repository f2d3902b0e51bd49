"""Choosing the device and the backend, and finding Transformer Engine."""

import importlib

import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.platform.device import (
    choose_backend,
    default_backend,
    device,
    find_transformer_engine,
)


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


def test_with_cuda(cuda):
    assert device() == torch.device("cuda", 3)
    assert default_backend() == choose_backend(None) == choose_backend("nccl") == "nccl"


def test_nccl_without_cuda_is_refused(no_cuda):
    with pytest.raises(InputError, match="--distributed-backend nccl .*--distributed-backend gloo"):
        choose_backend("nccl")


def test_an_unknown_backend_is_refused(cuda):
    with pytest.raises(InputError, match="--distributed-backend mpi .*gloo, nccl"):
        choose_backend("mpi")


@pytest.mark.parametrize(
    "error, reason",
    [
        (ModuleNotFoundError("No module named 'transformer_engine'"), "pip install"),
        (RuntimeError("no CUDA driver"), "does not load on this host: no CUDA driver"),
        (OSError("libcuda.so.1: not found"), "does not load on this host: libcuda.so.1"),
    ],
)
def test_the_reason_that_transformer_engine_is_not_used(monkeypatch, error, reason):
    def fail(name):
        assert name == "transformer_engine.pytorch"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    assert reason in find_transformer_engine()


def test_other_errors_of_transformer_engine_are_not_swallowed(monkeypatch):
    def fail(name):
        raise ValueError("a bug of its own")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ValueError, match="a bug of its own"):
        find_transformer_engine()


def test_transformer_engine_is_found_where_it_loads(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: torch)
    assert find_transformer_engine() is torch
