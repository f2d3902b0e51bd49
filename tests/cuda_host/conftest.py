import ctypes
import fcntl
import os
from pathlib import Path

import pytest

from tests.cuda_host import emulation


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    """The first of the run's workers that needs the library builds it."""
    if emulation.compiler() is None:
        pytest.skip("no C++ compiler to build the kernels with (CXX, c++)")
    of_worker = tmp_path_factory.getbasetemp()
    of_run = of_worker.parent if "PYTEST_XDIST_WORKER" in os.environ else of_worker
    folder = of_run / "cuda_host"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / emulation.LIBRARY
        return library if library.exists() else emulation.build(folder)


@pytest.fixture
def kernels(library) -> ctypes.CDLL:
    return emulation.load(library)
