"""autonomous_experts with norms: the probs, the norms and C are differentiated with the experts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_parallel.ops import Ops
from moe_parallel.ops.bounded_experts import within_budget
from tests.ops.cases import (
    BY_NAME,
    DTYPES,
    ROUTINGS,
    Routing,
    assert_close,
    assert_no_worse_than_twice,
    float64,
    gradients,
    random_tensor,
)
from tests.oracles import layers
from tests.oracles import ops as oracle

pytestmark = pytest.mark.covering

D, W, R = 6, 5, 3
# Every choice has a row, and there is no padding.
WHOLE = [r for r in ROUTINGS if r.pad_rows_per_expert is None and (r.experts >= 0).all()]
MANY = next(routing for routing in WHOLE if routing.name == "half_to_one")
DROPPED = BY_NAME["dropped_choices"]


def setting(routing: Routing, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """x, W_down, W_up, W_p and W_out."""
    experts = routing.num_experts
    shapes = [(len(routing.experts), D), (experts, D, R), (experts, R, W), (experts, D, W)]
    return tuple(
        random_tensor(*shape, dtype=dtype, device=device, seed=seed).requires_grad_()
        for seed, shape in enumerate([*shapes, (experts, W, D)])
    )


def upstream(routing: Routing, dtype: torch.dtype, device: str) -> Tensor:
    return random_tensor(len(routing.experts), D, dtype=dtype, device=device, seed=9)


def compute(ops: Ops, routing: Routing, *inputs: Tensor, **options: bool) -> Tensor:
    """The layer with its norms, as the selection hands them on: without a gradient."""
    x, w_down, *_ = inputs
    experts = torch.from_numpy(routing.experts).to(x.device)
    with torch.no_grad():
        c = torch.einsum("td,tkdr->tkr", x, w_down[experts])
        norms = torch.linalg.vector_norm(c.to(wide(x.dtype)), dim=-1)
        probs = norms.softmax(-1)
    row_map = ops.routing_map(experts, routing.num_experts, all_chosen=True)
    return ops.autonomous_experts(
        x, probs, row_map, *inputs[1:], c_TKR=c, norms_TK=norms, **options
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(routing: Routing, *inputs: Tensor) -> np.ndarray:
    x, down, up, p, out = map(float64, inputs)
    norms = oracle.norms(x, down)
    chosen = np.take_along_axis(norms, routing.experts, axis=1)
    probs = np.exp(chosen - chosen.max(1, keepdims=True, initial=0))
    probs /= probs.sum(1, keepdims=True)

    def expert(e: int, t: int, k: int) -> np.ndarray:
        return layers.autonomous_expert(x[t], down[e], up[e], p[e], out[e])

    return oracle.sum_of_experts(x, routing.experts, probs, expert)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", WHOLE, ids=str)
def test_equals_the_oracle(ops, device, routing, dtype):
    inputs = setting(routing, dtype, device)
    y = compute(ops, routing, *inputs)
    assert y.dtype == dtype
    assert_close(y, exact(routing, *inputs), dtype)


@pytest.mark.parametrize("recompute_gate", [True, False])
@pytest.mark.parametrize("routing", [WHOLE[i] for i in (0, 1, 2, 5)], ids=str)
def test_gradcheck(ops, device, routing, recompute_gate):
    """Differences move the norms and probs too, because `compute` takes them from its inputs."""
    assert torch.autograd.gradcheck(
        lambda *inputs: compute(ops, routing, *inputs, recompute_gate=recompute_gate),
        setting(routing, torch.float64, device),
        fast_mode=True,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", WHOLE, ids=str)
def test_gradients_equal_those_of_the_composition(reference, native, device, routing, dtype):
    inputs, dy = setting(routing, dtype, device), upstream(routing, dtype, device)
    found = gradients(compute(native, routing, *inputs), dy, *inputs)
    wanted = in_float64(reference, routing, *inputs, dy=dy)[1:]
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, float64(expected), dtype)


def in_float64(ops: Ops, routing: Routing, *inputs: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = compute(ops, routing, *doubles)
    return [y, *gradients(y, dy.double(), *doubles)]


def test_bf16_is_as_exact_as_torchs(reference, native, device):
    inputs, dy = setting(MANY, torch.bfloat16, device), upstream(MANY, torch.bfloat16, device)
    results = []
    for ops in (native, reference):
        y = compute(ops, MANY, *inputs)
        results.append([y, *gradients(y, dy, *inputs)])
    wanted = in_float64(reference, MANY, *inputs, dy=dy)
    for of_native, of_reference, of_exact in zip(*results, wanted, strict=True):
        assert_no_worse_than_twice(of_native, of_reference, float64(of_exact))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_the_gradient_through_norm_topk(native, device, dtype):
    """The same layer with the gradient of C and of the probs handed back to the selection."""
    inputs, dy = setting(MANY, dtype, device), upstream(MANY, dtype, device)

    def layer(gradient_here: bool) -> tuple[Tensor, ...]:
        x, w_down, *others = inputs
        with torch.set_grad_enabled(not gradient_here):
            scores = native.norm_topk(x, w_down, 2, keep="chosen", gradient="chosen")
            norms = scores.norms_TE.gather(1, scores.experts_TK)
            probs = norms.softmax(-1)
        row_map = native.routing_map(scores.experts_TK, MANY.num_experts, all_chosen=True)
        y = native.autonomous_experts(
            x,
            probs,
            row_map,
            w_down,
            *others,
            c_TKR=scores.c_TKR,
            norms_TK=norms if gradient_here else None,
        )
        return (y, *gradients(y, dy, *inputs))

    for here, handed_back in zip(layer(True), layer(False), strict=True):
        assert_close(here, float64(handed_back), dtype, rounded=2)


def test_one_choice_has_no_gradient_through_its_norm(ops, device):
    """The softmax over one norm is the constant 1, so only the experts teach W_down."""
    routing = next(r for r in WHOLE if r.name == "all_to_one")
    inputs, dy = setting(routing, torch.float64, device), upstream(routing, torch.float64, device)
    found = gradients(compute(ops, routing, *inputs), dy, *inputs)
    experts = torch.from_numpy(routing.experts).to(device)
    row_map = ops.routing_map(experts, routing.num_experts, all_chosen=True)
    ones = torch.ones(experts.shape, dtype=torch.float64, device=device)
    y = ops.autonomous_experts(inputs[0], ones, row_map, *inputs[1:])
    for actual, wanted in zip(found, gradients(y, dy, *inputs), strict=True):
        assert_close(actual, float64(wanted), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_norm_has_no_gradient(ops, device, dtype):
    inputs, dy = setting(WHOLE[0], dtype, device), upstream(WHOLE[0], dtype, device)
    with torch.no_grad():
        inputs[0][3] = 0
        inputs[1][2] = 0
    found = gradients(compute(ops, WHOLE[0], *inputs), dy, *inputs)
    assert all(gradient.isfinite().all() for gradient in found)
    assert (found[0][3] == 0).all()


def test_the_gradient_of_the_other_weights_is_added_to_main_gradients(native, device):
    inputs, dy = setting(MANY, torch.float32, device), upstream(MANY, torch.float32, device)
    wanted = gradients(compute(native, MANY, *inputs), dy, *inputs)
    main = tuple(torch.ones_like(weight) for weight in inputs[2:])
    y = compute(native, MANY, *inputs, main_gradients=main)
    found = gradients(y, dy, *inputs[:2])
    for actual, expected in zip((*found, *(m - 1 for m in main)), wanted, strict=True):
        assert_close(actual, float64(expected), torch.float32, rounded=2)


def test_parts_within_a_budget_have_the_same_gradients(native):
    inputs, dy = setting(MANY, torch.float64, "cpu"), upstream(MANY, torch.float64, "cpu")
    rows = 8 * (6 * W + 3 * R)
    bounded = within_budget(native, 500 * rows)
    y = compute(native, MANY, *inputs)
    assert torch.equal(compute(bounded, MANY, *inputs), y)
    wanted = gradients(y, dy, *inputs)
    found = gradients(compute(bounded, MANY, *inputs), dy, *inputs)
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, float64(expected), torch.float64)


def test_what_is_saved(native):
    """P, and what the selection has: C, the norms and the probs; nothing of the gradients."""
    inputs = setting(MANY, torch.float32, "cpu")
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute(native, MANY, *inputs)
    for given in inputs:
        seen.pop(given.data_ptr(), None)
    rows = MANY.experts.size
    row_map = 8 * (2 * rows + MANY.num_experts)
    assert sum(seen.values()) == row_map + 4 * rows * (W + R + 2)


def test_traces_as_one_graph(native, device):
    inputs, dy = setting(WHOLE[0], torch.float32, device), upstream(WHOLE[0], torch.float32, device)

    def layer(*inputs: Tensor) -> Tensor:
        return compute(native, WHOLE[0], *inputs)

    y, expected = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs), layer(*inputs)
    assert torch.equal(y, expected)
    found, wanted = gradients(y, dy, *inputs), gradients(expected, dy, *inputs)
    for actual, eager in zip(found, wanted, strict=True):
        assert torch.equal(actual, eager)


def without_c(ops: Ops, device: str) -> None:
    x, *weights = setting(WHOLE[0], torch.float32, device)
    row_map = ops.routing_map(torch.from_numpy(WHOLE[0].experts).to(device), 5)
    probs = torch.ones(WHOLE[0].experts.shape, device=device)
    ops.autonomous_experts(x, probs, row_map, *weights, norms_TK=probs)


def without_a_row(ops: Ops, device: str) -> None:
    x, *weights = setting(DROPPED, torch.float32, device)
    row_map = ops.routing_map(torch.from_numpy(DROPPED.experts).to(device), 5)
    ones = torch.ones(*DROPPED.experts.shape, R, device=device)
    ops.autonomous_experts(x, ones[..., 0], row_map, *weights, c_TKR=ones, norms_TK=ones[..., 0])


REFUSED: dict[str, Callable[[Ops, str], None]] = {
    "norms of c_TKR: give both": without_c,
    r"every choice has a row: 26 choices have \d+ rows": without_a_row,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_differentiated_is_refused(ops, device, said):
    with pytest.raises(ValueError, match=said):
        REFUSED[said](ops, device)


def test_norms_of_another_shape_are_refused(native, device):
    x, *weights = setting(WHOLE[0], torch.float32, device)
    row_map = native.routing_map(torch.from_numpy(WHOLE[0].experts).to(device), 5)
    ones = torch.ones(*WHOLE[0].experts.shape, R, device=device)
    with pytest.raises(ValueError, match=r"norms must have shape \[13, 2\], not \[13, 1\]"):
        native.autonomous_experts(
            x, ones[..., 0], row_map, *weights, c_TKR=ones, norms_TK=ones[:, :1, 0]
        )
