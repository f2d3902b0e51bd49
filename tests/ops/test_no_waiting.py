"""On a GPU nothing from the selection to the layer's gradients waits for the device, if every token
has all its choices, or the number of rows is fixed. Therefore a CUDA graph can capture all of it,
whatever the choices are."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from moe_parallel.ops import Ops
from tests.ops.cases import random_tensor

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["cuda"])]

T, D, F, R, E, K = 96, 64, 128, 32, 8, 2
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    drawn = (
        random_tensor(*shape, dtype=dtype, device="cuda", seed=seed)
        for seed, shape in enumerate(shapes)
    )
    return [tensor.div_(4).requires_grad_() for tensor in drawn]


def routed(ops: Ops, dtype: torch.dtype) -> Callable[[Tensor], list[Tensor]]:
    """A function of the scores, from the selection to the gradients."""
    x, *weights = tensors(dtype, (T, D), (E, D, 2 * F), (E, F, D))

    def step(scores_TE: Tensor) -> list[Tensor]:
        probs_TK, experts_TK = scores_TE.softmax(-1).topk(K)
        row_map = ops.routing_map(experts_TK, E, num_rows=experts_TK.numel())
        y = ops.routed_experts(x, probs_TK, row_map, *weights)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, scores_TE, *weights))]

    return step


def varying(ops: Ops, dtype: torch.dtype) -> Callable[[Tensor], list[Tensor]]:
    """The same for tokens with any number of experts, with room for some more rows."""
    x, *weights = tensors(dtype, (T, D), (E, D, 2 * F), (E, F, D))

    def step(scores_TE: Tensor) -> list[Tensor]:
        experts_TE = torch.arange(E, device="cuda").expand(T, E)
        experts_TE = experts_TE.masked_fill(scores_TE <= 0, -1)
        row_map = ops.routing_map(experts_TE, E, max_rows=T * E * 3 // 4)
        y = ops.routed_experts(x, scores_TE.relu(), row_map, *weights)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, scores_TE, *weights))]

    return step


def autonomous(
    ops: Ops, dtype: torch.dtype, joins_norms: bool = False
) -> Callable[[Tensor], list[Tensor]]:
    """The same as a function of the bias that is added to the norms for the ranking.

    `joins_norms`: the experts differentiate the norms.
    """
    x, *weights = tensors(dtype, (T, D), (E, D, R), (E, R, F), (E, D, F), (E, F, D))

    def step(scores_TE: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(not joins_norms):
            scores = ops.norm_topk(x, weights[0], K, 10 * scores_TE[0].detach(), keep="chosen")
            norms_TK = scores.norms_TE.gather(1, scores.experts_TK)
            probs_TK = norms_TK.softmax(-1)
        row_map = ops.routing_map(scores.experts_TK, E, num_rows=scores.experts_TK.numel())
        norms = {"norms_TK": norms_TK} if joins_norms else {}
        c = scores.c_TKR
        y = ops.autonomous_experts(x, probs_TK, row_map, *weights, c_TKR=c, **norms)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, *weights))]

    return step


LAYERS = [routed, varying, autonomous, partial(autonomous, joins_norms=True)]


def scores(seed: int) -> Tensor:
    tensor = random_tensor(T, E, dtype=torch.float32, device="cuda", seed=seed)
    return tensor.requires_grad_()


def assert_close(results: list[Tensor], wanted: list[Tensor]) -> None:
    for result, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(
            result, other, rtol=1e-3, atol=1e-3 * float(other.detach().abs().max())
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_no_step_waits(native, device, layer, dtype, request):
    step, given = layer(native, dtype), scores(0)
    wanted = step(given)  # the first call loads kernels and fills the allocator
    torch.cuda.synchronize()
    request.getfixturevalue("waiting_is_an_error")
    results = step(given)
    torch.cuda.set_sync_debug_mode("default")
    assert_close(results, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_graph_serves_other_choices(native, device, layer, dtype):
    step, given = layer(native, dtype), scores(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(given)
    for seed in (1, 2):
        other = scores(seed)
        with torch.no_grad():
            given.copy_(other)
        graph.replay()
        assert_close(captured, step(other))


@pytest.mark.parametrize("pad_rows_per_expert", [T, 20])
def test_a_padded_map_does_not_wait(native, device, pad_rows_per_expert, request):
    """An expert with more choices than rows drops some without an error."""
    experts = scores(0).topk(K).indices
    wanted = torch.bincount(experts.flatten(), minlength=E).clamp(max=pad_rows_per_expert)
    request.getfixturevalue("waiting_is_an_error")
    row_map = native.routing_map(experts, E, pad_rows_per_expert)
    torch.cuda.set_sync_debug_mode("default")
    placed = (row_map.slots_N.view(E, pad_rows_per_expert) >= 0).sum(1)
    assert torch.equal(placed, wanted)
    assert int((row_map.rows_TK >= 0).sum()) == int(wanted.sum())


def test_a_slot_beyond_the_tokens_reads_as_absent(native, device):
    x = tensors(torch.float32, (3, 8))[0].detach()
    slots = torch.tensor([0, 900, -1, 5], device=device)
    rows = torch.tensor([[0, -1], [-1, -1], [-1, 700]], device=device)
    y = torch.ops.moe_parallel.permute(x, slots, rows)
    assert torch.equal(y[0], x[0]) and not y[1:3].any()
    out = torch.ops.moe_parallel.unpermute(torch.ones(4, 8, device=device), slots, rows, None)
    assert torch.equal(out[0], torch.ones(8, device=device)) and not out[1:].any()
