"""Products on emulated tensor cores, with gathered rows and with the results of their epilogues,
compared with loops in float64 over the same 16-bit values."""

import ctypes
import mmap
from ctypes import POINTER, c_bool, c_int, c_int64, c_void_p
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.cuda_host.emulation import structure
from tests.cuda_host.test_grouped_gemm import GroupedMatrix

pytestmark = pytest.mark.full

SCALAR_TYPES = {torch.bfloat16: 2, torch.float16: 3}  # ScalarType in csrc/scalar_type.h
DTYPES = list(SCALAR_TYPES)

GatheredRows = structure(
    data=c_void_p, slots=c_void_p, choices=c_int64, source_rows=c_int64, stride=c_int64
)
ProductPart = structure(a=GatheredRows, first=GroupedMatrix, second=GroupedMatrix, depth=c_int64)
FusedProduct = structure(
    type=c_int,
    parts=ProductPart * 2,
    num_parts=c_int,
    offsets=c_void_p,
    groups=c_int64,
    rows=c_int64,
    columns=c_int64,
    columns_per_matrix=c_int64,
)
StoreRows = structure(d=c_void_p, stride=c_int64, accumulate=c_bool)
ActivateRows = structure(
    probs=c_void_p,
    h=c_void_p,
    gate=c_void_p,
    up=c_void_p,
    stride=c_int64,
)
SquareRows = structure(squares=c_void_p, c=c_void_p)
DifferentiateRows = structure(
    probs=c_void_p,
    gate=c_void_p,
    up=c_void_p,
    dgate=c_void_p,
    dup=c_void_p,
    h=c_void_p,
    dprobs=c_void_p,
    stride=c_int64,
    dstride=c_int64,
)
COUNTS = [[0, 200, 0, 1, 0], [130, 127, 1], [n % 4 for n in range(10)]]


@pytest.fixture(autouse=True, params=[8, 9], ids=["ampere", "hopper"])
def gpu(request, kernels):
    """A GPU of this compute capability, which selects the mainloop."""
    kernels.emulate_gpu(request.param)
    yield
    kernels.emulate_gpu(8)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def matrices(w: Tensor, first_column: int = 0) -> ctypes.Structure:
    """[groups, depth, columns], or a transposed view."""
    by_columns = w.stride(1) == 1 and w.stride(2) != 1
    stride = w.stride(2 if by_columns else 1)
    address = w.data_ptr() + first_column * w.element_size() * (stride if by_columns else 1)
    return GroupedMatrix(address, stride, w.stride(0), by_columns, False)


def transposed(w: Tensor) -> Tensor:
    """The same matrices with dense columns."""
    return w.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass
class Rows:
    """x in its own order, or x[slots / choices]."""

    x: Tensor
    slots: Tensor | None = None
    choices: int = 1

    def task(self) -> ctypes.Structure:
        slots = None if self.slots is None else self.slots.data_ptr()
        return GatheredRows(self.x.data_ptr(), slots, self.choices, len(self.x), self.x.stride(0))

    def exact(self) -> Tensor:
        x = self.x.double()
        if self.slots is None:
            return x
        beyond = (self.slots < 0) | (self.slots >= len(x) * self.choices)
        return x[(self.slots // self.choices).masked_fill(beyond, 0)].masked_fill(
            beyond[:, None], 0
        )


@dataclass
class Case:
    """The rows of groups, and the parts of a product over them."""

    dtype: torch.dtype
    counts: list[int]
    parts: list[tuple[Rows, ctypes.Structure, ctypes.Structure]]
    columns: int
    offsets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.offsets = torch.tensor([0, *self.counts]).cumsum(0)

    def task(self, **changes: object) -> ctypes.Structure:
        parts = (ProductPart * 2)()
        for i, (rows, first, second) in enumerate(self.parts):
            parts[i] = ProductPart(rows.task(), first, second, rows.x.shape[1])
        fields = {
            "type": SCALAR_TYPES[self.dtype],
            "parts": parts,
            "num_parts": len(self.parts),
            "offsets": self.offsets.data_ptr(),
            "groups": len(self.counts),
            "rows": sum(self.counts),
            "columns": self.columns,
            "columns_per_matrix": self.columns,
        }
        return FusedProduct(**(fields | changes))


def run(kernel, product: ctypes.Structure, epilogue: ctypes.Structure) -> None:
    kernel.restype = c_bool
    kernel.argtypes = [POINTER(FusedProduct), POINTER(type(epilogue))]
    assert kernel(product, epilogue)


@pytest.mark.parametrize("by_columns", [False, True])
def test_shared_memory_is_read_without_bank_conflicts(kernels, by_columns):
    """This affects only speed, so the values cannot show it."""
    x, w = Rows(draw(3, 72, dtype=torch.float16)), draw(1, 72, 136, dtype=torch.float16)
    w = transposed(w) if by_columns else w
    case = Case(torch.float16, [3], [(x, matrices(w), matrices(w))], 136)
    d = nan(3, 136, dtype=torch.float16)
    run(kernels.store_rows, case.task(), StoreRows(d.data_ptr(), 136, False))
    assert kernels.bank_conflicts() == 0


def exact_product(rows: Rows, w: Tensor, counts: list[int]) -> Tensor:
    groups = rows.exact().split(counts)
    return torch.cat([x @ matrix for x, matrix in zip(groups, w.double(), strict=True)])


def assert_close(found: Tensor, wanted: Tensor, units: float = 1.0) -> None:
    """Within `units` roundings to the type of `found`, of the value and of the largest value."""
    unit = units * torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found.double(), wanted, rtol=unit, atol=unit * float(wanted.abs().max()) / 8
    )


def gathered(counts: list[int], depth: int, dtype: torch.dtype, choices: int = 2) -> Rows:
    """Rows from fewer tokens than rows, with padding and with slots beyond the tokens."""
    rows, tokens = sum(counts), 1 + sum(counts) // choices
    generator = torch.Generator().manual_seed(3)
    slots = torch.randint(-2, tokens * choices + 2, (rows,), generator=generator)
    return Rows(draw(tokens, depth, dtype=dtype), slots, choices)


@pytest.mark.parametrize("by_columns, accumulate", [(False, True), (True, False)])
@pytest.mark.parametrize("depth, columns", [(8, 8), (200, 136), (72, 264)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store(kernels, dtype, counts, depth, columns, by_columns, accumulate):
    rows, w = gathered(counts, depth, dtype), draw(len(counts), depth, columns, dtype=dtype, seed=1)
    laid_out = transposed(w) if by_columns else w
    halves = matrices(laid_out), matrices(laid_out)
    case = Case(dtype, counts, [(rows, *halves)], columns)
    before = draw(sum(counts), columns, dtype=dtype, seed=2)
    wide = nan(sum(counts), columns + 8, dtype=dtype)
    d = wide[:, :columns].copy_(before)
    run(kernels.store_rows, case.task(), StoreRows(d.data_ptr(), d.stride(0), accumulate))
    wanted = exact_product(rows, w, counts) + (before.double() if accumulate else 0)
    assert_close(d, wanted)
    assert wide[:, columns:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_parts_of_one_sum(kernels, dtype):
    """[x | y] [v; w], like the gradient of a concatenation, with rows in their own order."""
    counts, columns = [3, 0, 140], 264
    x, y = (Rows(draw(143, depth, dtype=dtype, seed=depth)) for depth in (40, 72))
    v, w = (draw(3, depth, columns, dtype=dtype, seed=1 + depth) for depth in (40, 72))
    keep = transposed(v), transposed(w)
    halves_v, halves_w = matrices(keep[0]), matrices(keep[1])
    case = Case(dtype, counts, [(x, halves_v, halves_v), (y, halves_w, halves_w)], columns)
    d = nan(143, columns, dtype=dtype)
    run(kernels.store_rows, case.task(), StoreRows(d.data_ptr(), columns, False))
    assert_close(d, exact_product(x, v, counts) + exact_product(y, w, counts))


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("counts", [[1], [0, 129, 0, 0, 2], [0, 0, 3]], ids=str)
def test_stages_go_round(kernels, counts, by_columns):
    """Shared memory has four stages; here one tile fills all of them three times or more."""
    dtype, depth, columns = torch.bfloat16, 840, 136
    x = Rows(draw(sum(counts), depth, dtype=dtype))
    w = draw(len(counts), depth, columns, dtype=dtype, seed=1)
    laid_out = transposed(w) if by_columns else w
    halves = matrices(laid_out), matrices(laid_out)
    d = nan(sum(counts), columns, dtype=dtype)
    case = Case(dtype, counts, [(x, *halves)], columns)
    run(kernels.store_rows, case.task(), StoreRows(d.data_ptr(), columns, False))
    assert_close(d, exact_product(x, w, counts))


def at_the_end_of_memory(x: Tensor) -> Tensor:
    """A copy that ends where readable memory ends."""
    size = x.numel() * x.element_size()
    pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
    end = len(pages) - mmap.PAGESIZE
    copy = torch.frombuffer(pages, dtype=x.dtype, count=x.numel(), offset=end - size)
    beyond = c_void_p(copy.data_ptr() + size)
    assert ctypes.CDLL(None).mprotect(beyond, mmap.PAGESIZE, 0) == 0
    return copy.view(x.shape).copy_(x)


@pytest.mark.parametrize("by_columns", [False, True])
def test_what_is_not_copied_has_an_address_too(kernels, by_columns):
    """The last tile exceeds the rows, the columns and the depth."""
    x, w = draw(131, 72, dtype=torch.bfloat16), draw(1, 72, 136, dtype=torch.bfloat16, seed=1)
    laid_out = at_the_end_of_memory(w.transpose(1, 2) if by_columns else w)
    laid_out = laid_out.transpose(1, 2) if by_columns else laid_out
    rows = Rows(at_the_end_of_memory(x))
    case = Case(torch.bfloat16, [131], [(rows, matrices(laid_out), matrices(laid_out))], 136)
    d = nan(131, 136, dtype=torch.bfloat16)
    run(kernels.store_rows, case.task(), StoreRows(d.data_ptr(), 136, False))
    assert_close(d, exact_product(rows, w, [131]))


def test_a_kernel_without_its_shared_memory_is_not_started(kernels):
    x, w = Rows(draw(3, 16, dtype=torch.float16)), draw(1, 16, 16, dtype=torch.float16)
    case = Case(torch.float16, [3], [(x, matrices(w), matrices(w))], 16)
    d = torch.full((3, 16), 7, dtype=torch.float16)
    kernels.grant_shared_memory(False)
    run(kernels.store_rows, case.task(), StoreRows(d.data_ptr(), 16, False))
    kernels.grant_shared_memory(True)
    assert (d == 7).all()


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@pytest.mark.parametrize("depth, columns", [(72, 136)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activate(kernels, dtype, counts, depth, columns):
    """The routed layer's first stage: gate and up are the halves of one matrix."""
    rows = gathered(counts, depth, dtype)
    w = draw(len(counts), depth, 2 * columns, dtype=dtype, seed=1).div_(depth**0.5)
    case = Case(dtype, counts, [(rows, matrices(w), matrices(w, columns))], columns)
    h = nan(sum(counts), columns, dtype=dtype)
    gate_up = nan(sum(counts), 2 * columns, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    p = draw(sum(counts), dtype=torch.float32, seed=4)
    addresses = [t.data_ptr() for t in (p, h, gate, up)]
    run(kernels.activate_rows, case.task(), ActivateRows(*addresses, 2 * columns))
    assert_close(gate_up, exact_product(rows, w, counts))
    assert_close(h, silu(gate.double()) * up.double() * p.double()[:, None])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tokens, num_experts, rank", [(1, 1, 32), (130, 5, 96), (2200, 3, 32)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_square(kernels, dtype, tokens, num_experts, rank, keep):
    """The norms of all experts' C = x W: the matrices are side by side; rows have no group."""
    x, w = Rows(draw(tokens, 72, dtype=dtype)), draw(num_experts, 72, rank, dtype=dtype, seed=1)
    columns = num_experts * rank
    case = Case(dtype, [tokens], [(x, matrices(w), matrices(w))], columns)
    squares = nan(tokens, num_experts, rank // 32, dtype=torch.float32)
    c = nan(tokens, num_experts, rank, dtype=dtype)
    product = case.task(offsets=None, columns_per_matrix=rank)
    task = SquareRows(squares.data_ptr(), c.data_ptr() if keep else None)
    run(kernels.square_rows, product, task)
    exact = torch.einsum("td,edr->ter", x.exact(), w.double())
    wanted = exact.view(*squares.shape, 32).square().sum(-1)
    torch.testing.assert_close(squares.double(), wanted, rtol=1e-5, atol=0)
    if keep:
        assert_close(c, exact)
    else:
        assert c.isnan().all()


@pytest.mark.parametrize("columns", [8, 136])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differentiate(kernels, dtype, counts, columns):
    depth, rows = 72, sum(counts)
    dy = gathered(counts, depth, dtype)
    w_out = draw(len(counts), columns, depth, dtype=dtype, seed=1).div_(depth**0.5).transpose(1, 2)
    case = Case(dtype, counts, [(dy, matrices(w_out), matrices(w_out))], columns)
    gate_up = draw(rows, 2 * columns, dtype=dtype, seed=2)
    gate, up = gate_up.chunk(2, dim=1)
    d_gate_up = nan(rows, 2 * columns, dtype=dtype)
    dgate, dup = d_gate_up.chunk(2, dim=1)
    h, p = nan(rows, columns, dtype=dtype), draw(rows, dtype=torch.float32, seed=4)
    dp = nan(rows, -(-columns // 32), dtype=torch.float32)
    addresses = [t.data_ptr() for t in (p, gate, up, dgate, dup, h, dp)]
    task = DifferentiateRows(*addresses, 2 * columns, 2 * columns)
    run(kernels.differentiate_rows, case.task(), task)

    dh = exact_product(dy, w_out, counts).to(dtype).double()  # rounded as when stored
    g, u, q = (t.double().requires_grad_() for t in (gate, up, p))
    wanted_h = silu(g) * u * q[:, None]
    wanted = torch.autograd.grad(wanted_h, (g, u, q), dh)
    assert_close(h, wanted_h.detach())
    # dh itself may be rounded in the other direction.
    assert_close(dgate, wanted[0], 2)
    assert_close(dup, wanted[1], 2)
    limit = float(wanted[2].abs().max()) * torch.finfo(dtype).eps
    torch.testing.assert_close(dp.sum(1).double(), wanted[2], rtol=1e-2, atol=limit)


@pytest.mark.parametrize(
    "change",
    [{"type": 0}, {"columns": 12}, {"rows": 0}, {"columns": 0}],
    ids=str,
)
def test_what_is_left_to_others(kernels, change):
    x, w = Rows(draw(3, 16, dtype=torch.float16)), draw(1, 16, 16, dtype=torch.float16)
    case = Case(torch.float16, [3], [(x, matrices(w), matrices(w))], 16)
    d = nan(3, 16, dtype=torch.float16)
    kernels.store_rows.restype = c_bool
    task = StoreRows(d.data_ptr(), 16, False)
    assert kernels.store_rows(ctypes.byref(case.task()), ctypes.byref(task))
    d.fill_(7)
    assert not kernels.store_rows(ctypes.byref(case.task(**change)), ctypes.byref(task))
    assert (d == 7).all()


def test_rows_of_no_tokens_are_left_to_others(kernels):
    """All rows are padding."""
    slots = torch.full((3,), -1)
    x, w = (
        Rows(draw(0, 16, dtype=torch.float16), slots),
        draw(1, 16, 16, dtype=torch.float16),
    )
    case = Case(torch.float16, [3], [(x, matrices(w), matrices(w))], 16)
    kernels.store_rows.restype = c_bool
    task = StoreRows(nan(3, 16, dtype=torch.float16).data_ptr(), 16, False)
    assert not kernels.store_rows(ctypes.byref(case.task()), ctypes.byref(task))
