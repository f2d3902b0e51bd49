"""The squares of C = x W, summed on emulated tensor cores, compared with products in float64 of the
same 16-bit values."""

import ctypes
import mmap
from ctypes import c_bool, c_int, c_int64, c_void_p

import pytest
import torch
from torch import Tensor

from tests.cuda_host.emulation import structure

pytestmark = pytest.mark.full

SCALAR_TYPES = {torch.bfloat16: 2, torch.float16: 3}  # ScalarType in csrc/scalar_type.h
DTYPES = list(SCALAR_TYPES)

SumSquares = structure(
    type=c_int,
    x=c_void_p,
    w=c_void_p,
    squares=c_void_p,
    c=c_void_p,
    tokens=c_int64,
    num_experts=c_int64,
    depth=c_int64,
    rank=c_int64,
    x_stride=c_int64,
    expert_stride=c_int64,
    w_stride=c_int64,
)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


class Case:
    """x [tokens, depth], w [experts, depth, rank], and memory for the results."""

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self.x, self.w = x, w
        num_experts, _, rank = w.shape
        self.squares = nan(len(x), num_experts, rank // 32, dtype=torch.float32)
        self.c = nan(len(x), num_experts, rank, dtype=x.dtype)

    def run(self, kernels: ctypes.CDLL, **changes: object) -> bool:
        num_experts, depth, rank = self.w.shape
        fields = {
            "type": SCALAR_TYPES[self.x.dtype],
            "x": self.x.data_ptr(),
            "w": self.w.data_ptr(),
            "squares": self.squares.data_ptr(),
            "c": self.c.data_ptr(),
            "tokens": len(self.x),
            "num_experts": num_experts,
            "depth": depth,
            "rank": rank,
            "x_stride": self.x.stride(0),
            "expert_stride": self.w.stride(0),
            "w_stride": self.w.stride(1),
        }
        kernels.sum_squares.restype = c_bool
        return kernels.sum_squares(ctypes.byref(SumSquares(**(fields | changes))))

    def check(self, keeps_c: bool = True) -> None:
        exact = torch.einsum("td,edr->ter", self.x.double(), self.w.double())
        wanted = exact.view(*self.squares.shape, 32).square().sum(-1)
        torch.testing.assert_close(self.squares.double(), wanted, rtol=1e-5, atol=0)
        if not keeps_c:
            assert self.c.isnan().all()
            return
        unit = torch.finfo(self.c.dtype).eps  # of one rounding
        torch.testing.assert_close(
            self.c.double(), exact, rtol=unit, atol=unit * float(exact.abs().max()) / 8
        )


@pytest.mark.parametrize("keeps_c", [False, True])
@pytest.mark.parametrize(
    "tokens, num_experts, rank", [(1, 1, 32), (130, 5, 96), (129, 8, 64), (2200, 3, 32)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares(kernels, dtype, tokens, num_experts, rank, keeps_c):
    case = Case(draw(tokens, 72, dtype=dtype), draw(num_experts, 72, rank, dtype=dtype, seed=1))
    assert case.run(kernels, **({} if keeps_c else {"c": None}))
    case.check(keeps_c)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stages_go_round(kernels, dtype):
    """Shared memory has four stages; here one tile fills all of them three times or more."""
    case = Case(draw(129, 840, dtype=dtype), draw(3, 840, 96, dtype=dtype, seed=1))
    assert case.run(kernels)
    case.check()


def test_rows_with_gaps(kernels):
    x = nan(131, 80, dtype=torch.bfloat16)[:, :72].copy_(draw(131, 72, dtype=torch.bfloat16))
    w = nan(4, 72, 40, dtype=torch.bfloat16)[::2, :, :32]
    case = Case(x, w.copy_(draw(2, 72, 32, dtype=torch.bfloat16, seed=1)))
    assert case.run(kernels)
    case.check()


def at_the_end_of_memory(x: Tensor) -> Tensor:
    """A copy that ends where readable memory ends."""
    size = x.numel() * x.element_size()
    pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
    end = len(pages) - mmap.PAGESIZE
    copy = torch.frombuffer(pages, dtype=x.dtype, count=x.numel(), offset=end - size)
    beyond = c_void_p(copy.data_ptr() + size)
    assert ctypes.CDLL(None).mprotect(beyond, mmap.PAGESIZE, 0) == 0
    return copy.view(x.shape).copy_(x)


def test_what_is_not_copied_has_an_address_too(kernels):
    """The last tile exceeds the rows, the columns and the depth."""
    x, w = draw(131, 72, dtype=torch.bfloat16), draw(3, 72, 32, dtype=torch.bfloat16, seed=1)
    case = Case(at_the_end_of_memory(x), at_the_end_of_memory(w))
    assert case.run(kernels)
    case.check()


def test_a_kernel_without_its_shared_memory_is_not_started(kernels):
    case = Case(draw(3, 16, dtype=torch.float16), draw(1, 16, 32, dtype=torch.float16))
    kernels.grant_shared_memory(False)
    assert case.run(kernels)
    kernels.grant_shared_memory(True)
    assert case.squares.isnan().all()


@pytest.mark.parametrize(
    "change",
    [{"type": 0}, {"tokens": 0}, {"depth": 12}, {"rank": 48}, {"x_stride": 20}, {"w_stride": 36}],
    ids=str,
)
def test_what_is_left_to_others(kernels, change):
    case = Case(draw(3, 16, dtype=torch.float16), draw(1, 16, 32, dtype=torch.float16))
    assert not case.run(kernels, **change)
    assert case.squares.isnan().all()


def test_other_gpus_are_left_to_others(kernels):
    case = Case(draw(3, 16, dtype=torch.float16), draw(1, 16, 32, dtype=torch.float16))
    kernels.emulate_gpu(8)
    assert not case.run(kernels)
    kernels.emulate_gpu(9)
