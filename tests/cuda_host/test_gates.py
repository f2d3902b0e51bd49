"""SwiGLU of a gate that the kernel multiplies, on emulated tensor cores."""

from ctypes import c_void_p

import pytest
import torch

from tests.cuda_host.emulation import structure
from tests.cuda_host.test_fused_products import (
    COUNTS,
    DTYPES,
    Case,
    assert_close,
    draw,
    exact_product,
    gathered,
    matrices,
    nan,
    run,
    silu,
)
from tests.cuda_host.test_grouped_gemm import GroupedMatrix

pytestmark = pytest.mark.full

NOTHING = GroupedMatrix(None, 0, 0, False, False)
ActivateGateRows = structure(probs=c_void_p, up=c_void_p, h=c_void_p)
DifferentiateGateRows = structure(
    probs=c_void_p,
    dh=c_void_p,
    up=c_void_p,
    dgate=c_void_p,
    dup=c_void_p,
    h=c_void_p,
    dprobs=c_void_p,
)


def gate_case(dtype, counts, rank, columns):
    """C W_up: rows of choices, in the order of a row map; the exact gate, rounded; and the weight,
    whose memory the task uses."""
    c = gathered(counts, rank, dtype, choices=1)
    w_up = draw(len(counts), rank, columns, dtype=dtype, seed=1).div_(rank**0.5)
    case = Case(dtype, counts, [(c, matrices(w_up), NOTHING)], columns)
    return case, exact_product(c, w_up, counts).to(dtype).double(), w_up


@pytest.mark.parametrize("rank, columns", [(8, 8), (64, 136), (200, 264)])
@pytest.mark.parametrize("counts", [*COUNTS, [1], [0, 0, 3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activate_a_gate(kernels, dtype, counts, rank, columns):
    case, gate, w_up = gate_case(dtype, counts, rank, columns)
    up, h = draw(sum(counts), columns, dtype=dtype, seed=2), nan(sum(counts), columns, dtype=dtype)
    p = draw(sum(counts), dtype=torch.float32, seed=4)
    task = ActivateGateRows(p.data_ptr(), up.data_ptr(), h.data_ptr())
    run(kernels.activate_gate_rows, case.task(), task)
    # The gate may be rounded in the other direction.
    assert_close(h, silu(gate) * up.double() * p.double()[:, None], 4)
    del w_up  # until here


@pytest.mark.parametrize("rank, columns", [(8, 40), (72, 136), (200, 264)])
@pytest.mark.parametrize("counts", [*COUNTS, [1], [0, 0, 3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differentiate_a_gate(kernels, dtype, counts, rank, columns):
    case, gate, w_up = gate_case(dtype, counts, rank, columns)
    rows = sum(counts)
    dh, up = (draw(rows, columns, dtype=dtype, seed=seed) for seed in (2, 3))
    dgate, dup, h = (nan(rows, columns, dtype=dtype) for _ in range(3))
    p, dp = (
        draw(rows, dtype=torch.float32, seed=4),
        nan(rows, -(-columns // 32), dtype=torch.float32),
    )
    addresses = [t.data_ptr() for t in (p, dh, up, dgate, dup, h, dp)]
    run(kernels.differentiate_gate_rows, case.task(), DifferentiateGateRows(*addresses))

    g, u, q = (t.double().requires_grad_() for t in (gate, up, p))
    wanted_h = silu(g) * u * q[:, None]
    wanted = torch.autograd.grad(wanted_h, (g, u, q), dh.double())
    for found, its in ((h, wanted_h.detach()), (dgate, wanted[0]), (dup, wanted[1])):
        assert_close(found, its, 4)
    limit = float(wanted[2].abs().max()) * torch.finfo(dtype).eps
    torch.testing.assert_close(dp.sum(1).double(), wanted[2], rtol=1e-2, atol=limit)
    del w_up  # until here


def test_the_shared_memory_of_a_gate_is_read_without_bank_conflicts(kernels):
    case, _, w_up = gate_case(torch.float16, [70], 72, 136)
    up, h = draw(70, 136, dtype=torch.float16), nan(70, 136, dtype=torch.float16)
    run(
        kernels.activate_gate_rows, case.task(), ActivateGateRows(None, up.data_ptr(), h.data_ptr())
    )
    assert kernels.bank_conflicts() == 0
    del w_up  # until here
