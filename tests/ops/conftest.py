import pytest
import torch

from moe_parallel.ops import Ops, extension, select_backend


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def native(device: str) -> Ops:
    if not extension.is_built():
        pytest.skip("the C++ extension is not built: make set-up")
    if device == "cuda" and not extension.has_cuda():
        pytest.skip("the C++ extension is built without CUDA")
    return select_backend("native")


@pytest.fixture
def reference() -> Ops:
    return select_backend("reference")


@pytest.fixture(params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Both backends, compared with the same oracle."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["BLAS", "ONEDNN", "WHERE_FASTER"])
def library(request: pytest.FixtureRequest, native: Ops):
    """The library of products with results in fp32 on the CPU."""
    module = extension.load()
    before = module.set_cpu_products(getattr(module.CpuProducts, request.param))
    yield request.param
    module.set_cpu_products(before)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def unwritten_memory_shows():
    """torch fills new tensors with NaN, so that a value that an operator does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
