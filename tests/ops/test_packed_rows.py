import pytest
import torch

from moe_parallel.ops import select_backend
from moe_parallel.ops.packed_rows import pack_rows, packed_width, sum_dtype, unpack_rows
from tests.ops.cases import DTYPES, assert_close, float64, random_tensor
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

WIDTH, DESTINATIONS, THERE = 7, 3, 4
#: The numbers of each token; -1: none.
NUMBERS = {
    "one choice": [[3], [11], [-1], [4]],
    "some together": [[3, 0, 5, 9], [-1, 5, 4, -1], [8, -1, -1, 1], [-1, -1, -1, -1], [7, 6, 5, 4]],
    "all": [list(range(11, -1, -1))] * 3,
    "no token": [],
}


def numbers_of(name: str, device: str) -> torch.Tensor:
    rows = NUMBERS[name]
    width = len(rows[0]) if rows else 2
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, width)


def visits_by_loops(numbers) -> list[tuple[int, int, list[int]]]:
    """(destination, token, the places of its choices there), by destination, then by token."""
    found: dict[tuple[int, int], list[int]] = {}
    for token, of_token in enumerate(numbers.tolist()):
        for place, number in enumerate(of_token):
            if number >= 0:
                found.setdefault((number // THERE, token), []).append(place)
    return [(*key, found[key]) for key in sorted(found)]


def setting(ops, name: str, dtype: torch.dtype, device: str, pad: int | None = None):
    numbers = numbers_of(name, device)
    tokens, width = numbers.shape
    visited, _ = ops.visits(numbers, THERE, DESTINATIONS)
    row_map = ops.routing_map(visited, DESTINATIONS, pad)
    x = random_tensor(tokens, WIDTH, dtype=dtype, device=device, seed=0)
    probs = random_tensor(tokens, width, dtype=sum_dtype(dtype), device=device, seed=1)
    return numbers, row_map, x, probs


@pytest.mark.parametrize("name", NUMBERS)
def test_visits(ops, device, name):
    numbers = numbers_of(name, device)
    visited, counts = ops.visits(numbers, THERE, DESTINATIONS)
    wanted, counted = torch.full_like(numbers, -1), [[0, 0] for _ in range(DESTINATIONS)]
    for to, token, places in visits_by_loops(numbers):
        wanted[token, places[0]] = to
        counted[to][0] += 1
        counted[to][1] += len(places)
    assert visited.equal(wanted) and counts.tolist() == counted


@pytest.mark.parametrize("pad", [None, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_row_has_its_token_and_all_its_experts_there(ops, device, name, dtype, pad):
    numbers, row_map, x, probs = setting(ops, name, dtype, device, pad)
    packed = ops.pack_rows(x, probs, numbers, row_map, THERE)
    places = min(probs.shape[1], THERE)
    assert packed.dtype == dtype and packed.shape == (len(row_map.slots_N), packed_width(x, places))
    x_ND, experts_NJ, probs_NJ = unpack_rows(packed, WIDTH, places)
    found = [
        (row, each.tolist(), probs_NJ[row].tolist())
        for row, each in enumerate(experts_NJ)
        if row_map.slots_N[row] >= 0
    ]
    # With shards, a row has room for one choice of each expert; the first ones are taken.
    for (row, experts, its), (_, token, chosen) in zip(
        found, visits_by_loops(numbers), strict=True
    ):
        chosen = chosen[:places]
        empty = places - len(chosen)
        assert x_ND[row].tolist() == x[token].tolist()
        assert experts == [int(numbers[token, c]) % THERE for c in chosen] + [-1] * empty
        assert its == [probs[token, c].item() for c in chosen] + [0] * empty
    padding = row_map.slots_N < 0
    assert (x_ND[padding] == 0).all() and (experts_NJ[padding] == -1).all()
    assert (probs_NJ[padding] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_are_those_of_separate_messages(ops, device, name, dtype):
    """The token's gradient is that of a permute; that of a prob comes from its one place."""
    numbers, row_map, x, probs = setting(ops, name, dtype, device)
    inputs, places = [x.requires_grad_(), probs.requires_grad_()], min(probs.shape[1], THERE)
    packed = ops.pack_rows(x, probs, numbers, row_map, THERE)
    x_ND, _, probs_NJ = unpack_rows(packed, WIDTH, places)
    rows = len(row_map.slots_N)
    upstream = [
        random_tensor(rows, WIDTH, dtype=dtype, device=device, seed=3),
        random_tensor(rows, places, dtype=probs.dtype, device=device, seed=4),
    ]
    dx, dprobs = torch.autograd.grad([x_ND, probs_NJ], inputs, upstream)
    slots, width = row_map.slots_N.tolist(), numbers.shape[1]
    wanted = oracle.permute_gradient(float64(upstream[0]), slots, width, len(x))
    assert_close(dx, wanted, dtype)
    wanted = torch.zeros_like(probs)
    for row, (_, token, chosen) in enumerate(visits_by_loops(numbers)):
        for place, choice in enumerate(chosen):
            wanted[token, choice] = upstream[1][row, place]
    assert dprobs.equal(wanted.detach())


def test_the_gradient_of_a_prob_is_the_sum_over_its_shards(ops, device):
    """Expert 0 has the numbers 0 and 4, expert 1 the numbers 1 and 5."""
    numbers = torch.tensor([[0, 4, 1, 5]], device=device)
    visited, _ = ops.visits(numbers, THERE, 2)
    row_map = ops.routing_map(visited, 2)
    x = torch.ones(1, WIDTH, device=device)
    probs = torch.tensor([[0.25, 0.75]], device=device, requires_grad=True)
    _, _, probs_NJ = unpack_rows(ops.pack_rows(x, probs, numbers, row_map, THERE), WIDTH, 2)
    assert probs_NJ.tolist() == [[0.25, 0.75]] * 2
    probs_NJ.backward(torch.tensor([[1.0, 2.0], [10.0, 20.0]], device=device))
    assert probs.grad.tolist() == [[11, 22]]


def test_bits_that_are_no_number_in_bf16_pass_unchanged(ops, device):
    """The low half of the prob is the bits of a NaN in bf16."""
    numbers, row_map, x, probs = setting(ops, "some together", torch.bfloat16, device)
    bits = torch.full(probs.shape, 0x3F807FC1, dtype=torch.int32, device=device)
    probs = bits.view(torch.float32).requires_grad_()
    packed = ops.pack_rows(x, probs, numbers, row_map, THERE)
    _, experts_NJ, probs_NJ = unpack_rows(packed, WIDTH, 4)
    here = experts_NJ >= 0
    assert (probs_NJ.detach().view(torch.int32)[here] == 0x3F807FC1).all()
    probs_NJ.backward(probs_NJ.detach())
    assert (probs.grad.view(torch.int32)[numbers >= 0] == 0x3F807FC1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_compute_with_packed_rows_as_with_copies(ops, device, dtype):
    """Views of the rows that arrived give the same bits as tensors without gaps."""
    numbers, row_map, x, probs = setting(ops, "some together", dtype, device)
    packed = ops.pack_rows(x, probs, numbers, row_map, THERE).detach()
    w_in = random_tensor(THERE, WIDTH, 8, dtype=dtype, device=device, seed=6)
    w_out = random_tensor(THERE, 4, WIDTH, dtype=dtype, device=device, seed=7)
    found = []
    for copied in (False, True):
        given = packed.clone().requires_grad_()
        x_MD, experts_MJ, probs_MJ = unpack_rows(given, WIDTH, 4)
        assert x_MD.stride(0) == packed.shape[1]
        x_MD = x_MD.contiguous() if copied else x_MD
        y_MD = ops.routed_experts(x_MD, probs_MJ, ops.routing_map(experts_MJ, THERE), w_in, w_out)
        y_MD.backward(torch.ones_like(y_MD))
        dx_MD, _, dprobs_MJ = unpack_rows(given.grad, WIDTH, 4)
        found.append((y_MD, dx_MD, dprobs_MJ))
    for view, copy in zip(*found, strict=True):
        assert torch.equal(view, copy)


def test_the_gradient_of_a_view_is_packed_without_a_copy(native, device):
    """The experts write it with the gaps that the message needs."""
    numbers, row_map, x, probs = setting(native, "some together", torch.float32, device)
    packed = native.pack_rows(x, probs, numbers, row_map, THERE).detach().requires_grad_()
    x_MD, experts_MJ, probs_MJ = unpack_rows(packed, WIDTH, 4)
    seen = []
    x_MD.register_hook(lambda dx: seen.append((dx.stride(), dx.data_ptr())))
    w_in, w_out = (
        random_tensor(*sizes, dtype=torch.float32, device=device, seed=8)
        for sizes in ((THERE, WIDTH, 8), (THERE, 4, WIDTH))
    )
    arrived = native.routing_map(experts_MJ, THERE)
    y_MD = native.routed_experts(x_MD, probs_MJ, arrived, w_in, w_out)
    (dpacked,) = torch.autograd.grad(y_MD.sum(), packed)
    assert seen == [((packed.shape[1], 1), dpacked.data_ptr())]


def test_a_gradient_in_other_memory_is_copied():
    """A gradient with gaps that is only a part of its memory is not what it seems."""
    ops = select_backend("reference")
    numbers, row_map, x, probs = setting(ops, "some together", torch.float32, "cpu")
    packed = pack_rows(x, probs, numbers, row_map, THERE).requires_grad_()
    x_ND, *_ = unpack_rows(packed, WIDTH, 4)
    rows, apart = packed.shape
    memory = torch.full((rows * apart - 1,), 5.0)
    upstream = memory.as_strided((rows, WIDTH), (apart, 1))
    (dpacked,) = torch.autograd.grad(x_ND, packed, upstream)
    assert torch.equal(dpacked[:, :WIDTH], torch.full((rows, WIDTH), 5.0))
    assert torch.equal(unpack_rows(dpacked, WIDTH, 4)[2], torch.zeros(rows, 4))
    assert (memory == 5).all()
