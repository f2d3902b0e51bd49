import pytest
import torch

from moe_parallel.ops import select_backend
from moe_parallel.ops.packed_rows import pack_rows, packed_width, sum_dtype, unpack_rows
from tests.ops.cases import (
    DTYPES,
    ROUTINGS,
    Routing,
    assert_close,
    float64,
    random_tensor,
)
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

WIDTH, RANK = 7, 3


def setting(ops, routing: Routing, dtype: torch.dtype, device: str, rank: int = RANK):
    """The row map, x, the probs and C (None if `rank` is 0)."""
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, routing.pad_rows_per_expert)
    tokens, choices = experts.shape
    x = random_tensor(tokens, WIDTH, dtype=dtype, device=device, seed=0)
    probs = random_tensor(tokens, choices, dtype=sum_dtype(dtype), device=device, seed=1)
    c = random_tensor(tokens, choices, rank, dtype=dtype, device=device, seed=2) if rank else None
    return row_map, x, probs, c


def required(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [each.requires_grad_() for each in tensors if each is not None]


@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_each_row_has_its_token_prob_and_c(ops, device, routing, dtype, rank):
    row_map, x, probs, c = setting(ops, routing, dtype, device, rank)
    packed = ops.pack_rows(x, probs, row_map, c)
    assert packed.dtype == dtype and packed.shape[1] * packed.element_size() % 16 == 0
    x_ND, probs_N, c_NR = unpack_rows(packed, WIDTH, rank)
    assert probs_N.dtype == probs.dtype and (c_NR is None) == (rank == 0)
    choices = probs.shape[1]
    for row, slot in enumerate(row_map.slots_N.tolist()):
        token, choice = divmod(slot, choices)
        is_padding = slot < 0
        assert x_ND[row].tolist() == ([0] * WIDTH if is_padding else x[token].tolist())
        assert probs_N[row] == (0 if is_padding else probs[token, choice])
        if c is not None:
            of_row = [0] * rank if is_padding else c[token, choice].tolist()
            assert c_NR[row].tolist() == of_row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_gradients_are_those_of_separate_messages(ops, device, routing, dtype):
    """The token's gradient is that of a permute; those of a prob and of C come from one row."""
    row_map, x, probs, c = setting(ops, routing, dtype, device)
    inputs = required(x, probs, c)
    outputs = unpack_rows(ops.pack_rows(x, probs, row_map, c), WIDTH, RANK)
    rows = len(row_map.slots_N)
    upstream = [
        random_tensor(rows, WIDTH, dtype=dtype, device=device, seed=3),
        random_tensor(rows, dtype=probs.dtype, device=device, seed=4),
        random_tensor(rows, RANK, dtype=dtype, device=device, seed=5),
    ]
    dx, dprobs, dc = torch.autograd.grad(outputs, inputs, upstream)
    slots, choices = row_map.slots_N.tolist(), probs.shape[1]
    wanted = oracle.permute_gradient(float64(upstream[0]), slots, choices, len(x))
    assert_close(dx, wanted, dtype)
    for token, of_token in enumerate(row_map.rows_TK.tolist()):
        for choice, row in enumerate(of_token):
            assert dprobs[token, choice] == (0 if row < 0 else upstream[1][row])
            of_row = [0] * RANK if row < 0 else upstream[2][row].tolist()
            assert dc[token, choice].tolist() == of_row


def test_bits_that_are_no_number_in_bf16_pass_unchanged(ops, device):
    """The low half of the prob is the bits of a NaN in bf16."""
    row_map, x, probs, _ = setting(ops, ROUTINGS[0], torch.bfloat16, device, rank=0)
    bits = torch.full(probs.shape, 0x3F807FC1, dtype=torch.int32, device=device)
    probs = bits.view(torch.float32).requires_grad_()
    _, probs_N, _ = unpack_rows(ops.pack_rows(x, probs, row_map), WIDTH, 0)
    assert (probs_N.detach().view(torch.int32) == 0x3F807FC1).all()
    probs_N.backward(
        torch.full_like(probs_N, 1.0).view(torch.int32).add(0x7FC1).view(torch.float32)
    )
    kept = row_map.rows_TK >= 0
    assert (probs.grad.view(torch.int32)[kept] == 0x3F807FC1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_compute_with_packed_rows_as_with_copies(ops, device, dtype):
    """Views of the rows that arrived give the same bits as tensors without gaps."""
    row_map, x, probs, _ = setting(ops, ROUTINGS[0], dtype, device, rank=0)
    packed = ops.pack_rows(x, probs, row_map).detach()
    experts_M = torch.arange(len(packed), device=device) % 3
    arrived = ops.routing_map(experts_M[:, None], 3, all_chosen=True)
    w_in = random_tensor(3, WIDTH, 8, dtype=dtype, device=device, seed=6)
    w_out = random_tensor(3, 4, WIDTH, dtype=dtype, device=device, seed=7)
    found = []
    for copied in (False, True):
        given = packed.clone().requires_grad_()
        x_MD, probs_M, _ = unpack_rows(given, WIDTH, 0)
        assert x_MD.stride(0) == packed.shape[1]
        x_MD = x_MD.contiguous() if copied else x_MD
        y_MD = ops.routed_experts(x_MD, probs_M[:, None], arrived, w_in, w_out)
        y_MD.backward(torch.ones_like(y_MD))
        dx_MD, dprobs_M, _ = unpack_rows(given.grad, WIDTH, 0)
        found.append((y_MD, dx_MD, dprobs_M))
    for view, copy in zip(*found, strict=True):
        assert torch.equal(view, copy)


def test_the_gradient_of_a_view_is_packed_without_a_copy(native, device):
    """The experts write it with the gaps that the message needs."""
    row_map, x, probs, _ = setting(native, ROUTINGS[0], torch.float32, device, rank=0)
    packed = native.pack_rows(x, probs, row_map).detach().requires_grad_()
    x_MD, probs_M, _ = unpack_rows(packed, WIDTH, 0)
    seen = []
    x_MD.register_hook(lambda dx: seen.append((dx.stride(), dx.data_ptr())))
    arrived = native.routing_map(
        torch.zeros(len(packed), 1, dtype=torch.int64, device=device), 1, all_chosen=True
    )
    w_in, w_out = (
        random_tensor(*sizes, dtype=torch.float32, device=device, seed=8)
        for sizes in ((1, WIDTH, 8), (1, 4, WIDTH))
    )
    y_MD = native.routed_experts(x_MD, probs_M[:, None], arrived, w_in, w_out)
    (dpacked,) = torch.autograd.grad(y_MD.sum(), packed)
    assert seen == [((packed.shape[1], 1), dpacked.data_ptr())]


def test_a_gradient_in_other_memory_is_copied():
    """A gradient with gaps that is only a part of its memory is not what it seems."""
    row_map, x, probs, _ = setting(
        select_backend("reference"), ROUTINGS[0], torch.float32, "cpu", rank=0
    )
    packed = pack_rows(x, probs, row_map).requires_grad_()
    x_ND, _, _ = unpack_rows(packed, WIDTH, 0)
    rows, apart = packed.shape
    memory = torch.full((rows * apart - 1,), 5.0)
    upstream = memory.as_strided((rows, WIDTH), (apart, 1))
    (dpacked,) = torch.autograd.grad(x_ND, packed, upstream)
    assert torch.equal(dpacked[:, :WIDTH], torch.full((rows, WIDTH), 5.0))
    assert torch.equal(unpack_rows(dpacked, WIDTH, 0)[1], torch.zeros(rows))
    assert (memory == 5).all()


def test_widths(native):
    assert packed_width(torch.empty(0, 512, dtype=torch.bfloat16), 0) == 520
    assert packed_width(torch.empty(0, 510, dtype=torch.bfloat16), 0) == 512
    assert packed_width(torch.empty(0, 512, dtype=torch.bfloat16), 64) == 584
    assert packed_width(torch.empty(0, 512), 0) == 516
    assert packed_width(torch.empty(0, 5, dtype=torch.float64), 1) == 8
