import ctypes
from pathlib import Path

import pytest

from tests.cuda_host import emulation


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    if emulation.compiler() is None:
        pytest.skip("no C++ compiler to build the kernels with (CXX, c++)")
    return emulation.build(tmp_path_factory.mktemp("cuda_host"))


@pytest.fixture
def kernels(library) -> ctypes.CDLL:
    return emulation.load(library)
