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

WIDTH, PLACES = 7, 3


def setting(ops, routing: Routing, dtype: torch.dtype, device: str, places: int = PLACES):
    """The row map, x, and the experts and probs of each row."""
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, routing.pad_rows_per_expert)
    rows = len(row_map.slots_N)
    x = random_tensor(len(experts), WIDTH, dtype=dtype, device=device, seed=0)
    probs = random_tensor(rows, places, dtype=sum_dtype(dtype), device=device, seed=1)
    there = torch.arange(rows * places, device=device).view(rows, places) * 97 % 32768 - 1
    return row_map, x, there, probs


@pytest.mark.parametrize("places", [1, 2, PLACES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_each_row_has_its_token_experts_and_probs(ops, device, routing, dtype, places):
    row_map, x, experts, probs = setting(ops, routing, dtype, device, places)
    packed = ops.pack_rows(x, experts, probs, row_map)
    assert packed.dtype == dtype and packed.shape[1] * packed.element_size() % 16 == 0
    x_ND, experts_NJ, probs_NJ = unpack_rows(packed, WIDTH, places)
    assert experts_NJ.equal(experts) and probs_NJ.equal(probs)
    for row, slot in enumerate(row_map.slots_N.tolist()):
        token = slot // row_map.rows_TK.shape[1]
        assert x_ND[row].tolist() == ([0] * WIDTH if slot < 0 else x[token].tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_gradients_are_those_of_separate_messages(ops, device, routing, dtype):
    """The token's gradient is that of a permute; those of the probs come back as they are."""
    row_map, x, experts, probs = setting(ops, routing, dtype, device)
    inputs = [x.requires_grad_(), probs.requires_grad_()]
    x_ND, _, probs_NJ = unpack_rows(ops.pack_rows(x, experts, probs, row_map), WIDTH, PLACES)
    rows = len(row_map.slots_N)
    upstream = [
        random_tensor(rows, WIDTH, dtype=dtype, device=device, seed=3),
        random_tensor(rows, PLACES, dtype=probs.dtype, device=device, seed=4),
    ]
    dx, dprobs = torch.autograd.grad([x_ND, probs_NJ], inputs, upstream)
    slots, choices = row_map.slots_N.tolist(), row_map.rows_TK.shape[1]
    wanted = oracle.permute_gradient(float64(upstream[0]), slots, choices, len(x))
    assert_close(dx, wanted, dtype)
    assert dprobs.equal(upstream[1])


def test_bits_that_are_no_number_in_bf16_pass_unchanged(ops, device):
    """The low half of the prob is the bits of a NaN in bf16."""
    row_map, x, experts, probs = setting(ops, ROUTINGS[0], torch.bfloat16, device)
    bits = torch.full(probs.shape, 0x3F807FC1, dtype=torch.int32, device=device)
    probs = bits.view(torch.float32).requires_grad_()
    _, _, probs_NJ = unpack_rows(ops.pack_rows(x, experts, probs, row_map), WIDTH, PLACES)
    assert (probs_NJ.detach().view(torch.int32) == 0x3F807FC1).all()
    probs_NJ.backward(probs_NJ.detach())
    assert (probs.grad.view(torch.int32) == 0x3F807FC1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_compute_with_packed_rows_as_with_copies(ops, device, dtype):
    """Views of the rows that arrived give the same bits as tensors without gaps."""
    row_map, x, _, probs = setting(ops, ROUTINGS[0], dtype, device, places=2)
    experts = torch.stack([torch.arange(len(probs)) % 3, torch.arange(len(probs)) % 2 - 1], 1)
    packed = ops.pack_rows(x, experts.to(device), probs, row_map).detach()
    w_in = random_tensor(3, WIDTH, 8, dtype=dtype, device=device, seed=6)
    w_out = random_tensor(3, 4, WIDTH, dtype=dtype, device=device, seed=7)
    found = []
    for copied in (False, True):
        given = packed.clone().requires_grad_()
        x_MD, experts_MJ, probs_MJ = unpack_rows(given, WIDTH, 2)
        assert x_MD.stride(0) == packed.shape[1]
        x_MD = x_MD.contiguous() if copied else x_MD
        y_MD = ops.routed_experts(x_MD, probs_MJ, ops.routing_map(experts_MJ, 3), w_in, w_out)
        y_MD.backward(torch.ones_like(y_MD))
        dx_MD, _, dprobs_MJ = unpack_rows(given.grad, WIDTH, 2)
        found.append((y_MD, dx_MD, dprobs_MJ))
    for view, copy in zip(*found, strict=True):
        assert torch.equal(view, copy)


def test_the_gradient_of_a_view_is_packed_without_a_copy(native, device):
    """The experts write it with the gaps that the message needs."""
    row_map, x, _, probs = setting(native, ROUTINGS[0], torch.float32, device, places=1)
    experts = torch.zeros(len(probs), 1, dtype=torch.int64, device=device)
    packed = native.pack_rows(x, experts, probs, row_map).detach().requires_grad_()
    x_MD, experts_MJ, probs_MJ = unpack_rows(packed, WIDTH, 1)
    seen = []
    x_MD.register_hook(lambda dx: seen.append((dx.stride(), dx.data_ptr())))
    w_in, w_out = (
        random_tensor(*sizes, dtype=torch.float32, device=device, seed=8)
        for sizes in ((1, WIDTH, 8), (1, 4, WIDTH))
    )
    y_MD = native.routed_experts(x_MD, probs_MJ, native.routing_map(experts_MJ, 1), w_in, w_out)
    (dpacked,) = torch.autograd.grad(y_MD.sum(), packed)
    assert seen == [((packed.shape[1], 1), dpacked.data_ptr())]


def test_a_gradient_in_other_memory_is_copied():
    """A gradient with gaps that is only a part of its memory is not what it seems."""
    row_map, x, experts, probs = setting(
        select_backend("reference"), ROUTINGS[0], torch.float32, "cpu"
    )
    packed = pack_rows(x, experts, probs, row_map).requires_grad_()
    x_ND, *_ = unpack_rows(packed, WIDTH, PLACES)
    rows, apart = packed.shape
    memory = torch.full((rows * apart - 1,), 5.0)
    upstream = memory.as_strided((rows, WIDTH), (apart, 1))
    (dpacked,) = torch.autograd.grad(x_ND, packed, upstream)
    assert torch.equal(dpacked[:, :WIDTH], torch.full((rows, WIDTH), 5.0))
    assert torch.equal(unpack_rows(dpacked, WIDTH, PLACES)[2], torch.zeros(rows, PLACES))
    assert (memory == 5).all()


def test_widths(native):
    assert packed_width(torch.empty(0, 512, dtype=torch.bfloat16), 1) == 520
    assert packed_width(torch.empty(0, 508, dtype=torch.bfloat16), 1) == 512
    assert packed_width(torch.empty(0, 512, dtype=torch.bfloat16), 8) == 512 + 24
    assert packed_width(torch.empty(0, 512), 2) == 512 + 4
    assert packed_width(torch.empty(0, 5, dtype=torch.float64), 2) == 8
