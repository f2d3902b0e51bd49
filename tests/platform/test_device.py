"""The choice of the device and the backend."""

import mmap
from pathlib import Path

import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.platform import device as memory
from moe_parallel.platform.device import choose_backend, peak_memory
from tests.distributed import run_distributed


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


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


def test_nccl_without_cuda_is_refused(no_cuda):
    with pytest.raises(InputError, match="--distributed-backend nccl .*--distributed-backend gloo"):
        choose_backend("nccl")


def group(folder: Path, *, limit: str, used: int, pages: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, pages_name = names
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{pages_name} {pages}\n")


NAMES_2 = ("memory.max", "memory.current", "file")


def left(tmp_path: Path, own: str) -> list[int]:
    (tmp_path / "cgroup").write_text(own)
    return list(memory._left_by_cgroups(tmp_path / "sys", tmp_path / "cgroup"))


def test_version_2(tmp_path: Path) -> None:
    group(tmp_path / "sys/a/b", limit="1000", used=700, pages=100, names=NAMES_2)
    group(tmp_path / "sys/a", limit="max", used=900, pages=0, names=NAMES_2)
    assert left(tmp_path, "0::/a/b\n") == [400]
    group(tmp_path / "sys/a", limit="950", used=900, pages=0, names=NAMES_2)
    assert sorted(left(tmp_path, "0::/a/b\n")) == [50, 400]
    # In a container the root is the container's own group.
    group(tmp_path / "sys", limit="100", used=200, pages=50, names=NAMES_2)
    assert left(tmp_path, "0::/\n") == [0]


def test_released_memory_can_be_needed_again() -> None:
    # A map of its own: an allocator may keep what is freed, or place it in memory that the process
    # already has.
    held = mmap.mmap(-1, 2**26)
    for page in range(0, 2**26, mmap.PAGESIZE):
        held[page] = 1
    before = memory.memory_to_regain()
    held.close()
    assert memory.memory_to_regain() >= before + 0.9 * 2**26
