"""routed_experts and autonomous_experts: values by the oracle's loops, gradients by differences."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_parallel.ops import Ops
from tests.ops.cases import (
    BY_NAME,
    DTYPES,
    LAYOUTS,
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

D, F, R = 6, 5, 3
SOME = [ROUTINGS[i] for i in (0, 1, 5, 6, 8, 12, 14)]


@dataclass
class Setting:
    """A layer of each kind with one routing."""

    routing: Routing
    dtype: torch.dtype
    device: str
    sizes: tuple[int, int, int] = (D, F, R)  # the widths of a token, between the products, and of C

    def tensor(self, seed: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        return random_tensor(*shape, dtype=dtype, device=self.device, seed=seed).requires_grad_()

    def __post_init__(self) -> None:
        (tokens, choices), experts = self.routing.experts.shape, self.routing.num_experts
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        D, F, R = self.sizes
        self.x = self.tensor(0, tokens, D)
        self.probs = self.tensor(1, tokens, choices, dtype=wide)
        self.dy = self.tensor(2, tokens, D).detach()
        self.w_gate_up = self.tensor(3, experts, D, 2 * F)
        self.w_out = self.tensor(4, experts, F, D)
        self.w_down = self.tensor(5, experts, D, R)
        self.w_up = self.tensor(6, experts, R, F)
        self.w_p = self.tensor(7, experts, D, F)
        self.c = self.tensor(8, tokens, choices, R)

    def inputs(self, kind: str) -> tuple[Tensor, ...]:
        """The tensors by which the output is differentiated."""
        if kind == "routed":
            return self.x, self.probs, self.w_gate_up, self.w_out
        if kind == "with norms":
            return self.x, self.w_down, self.w_up, self.w_p, self.w_out
        first = self.c if kind == "handed on" else self.w_down
        return self.x, self.probs, first, self.w_up, self.w_p, self.w_out

    def compute(
        self,
        ops: Ops,
        kind: str,
        *inputs: Tensor,
        all_chosen: bool = False,
        main_gradients: Any = None,
        max_rows: int | None = None,
    ) -> Tensor:
        experts = torch.from_numpy(self.routing.experts).to(self.device)
        row_map = ops.routing_map(
            experts,
            self.routing.num_experts,
            self.routing.pad_rows_per_expert,
            experts.numel() if all_chosen else None,
            max_rows,
        )
        x, probs, *weights = inputs or self.inputs(kind)
        if kind == "with norms":
            return self._with_norms(ops, x, probs, *weights, main_gradients=main_gradients)
        if kind == "routed":
            return ops.routed_experts(x, probs, row_map, *weights, main_gradients=main_gradients)
        if kind == "handed on":
            c, *weights = weights
            return ops.autonomous_experts(
                x, probs, row_map, self.w_down, *weights, c_TKR=c, main_gradients=main_gradients
            )
        return ops.autonomous_experts(
            x,
            probs,
            row_map,
            *weights,
            recompute_gate=kind == "autonomous",
            main_gradients=main_gradients,
        )

    def _with_norms(
        self, ops: Ops, x: Tensor, w_down: Tensor, *weights: Tensor, **main: Any
    ) -> Tensor:
        """The norms as the selection hands them on: without a gradient. The experts have it."""
        experts = torch.from_numpy(self.routing.experts).to(x.device)
        with torch.no_grad():
            c = torch.einsum("td,tkdr->tkr", x, w_down[experts])
            norms = torch.linalg.vector_norm(c.to(self.probs.dtype), dim=-1)
        row_map = ops.routing_map(experts, self.routing.num_experts, num_rows=experts.numel())
        return ops.autonomous_experts(
            x, norms.softmax(-1), row_map, w_down, *weights, c_TKR=c, norms_TK=norms, **main
        )

    def passes(self, ops: Ops, kind: str, max_rows: int | None = None) -> list[Tensor]:
        """The output, and the gradient of every input."""
        y = self.compute(ops, kind, max_rows=max_rows)
        return [y, *gradients(y, self.dy, *self.inputs(kind))]

    def exact(self, kind: str) -> np.ndarray:
        F = self.sizes[1]
        x, (gate_up, out) = float64(self.x), map(float64, (self.w_gate_up, self.w_out))
        down, up, p, c = map(float64, (self.w_down, self.w_up, self.w_p, self.c))

        def expert(e: int, t: int, k: int) -> Any:
            if kind == "routed":
                return layers.swiglu_expert(x[t], gate_up[e][:, :F], gate_up[e][:, F:], out[e])
            if kind == "handed on":
                return (layers.silu(c[t, k] @ up[e]) * (x[t] @ p[e])) @ out[e]
            return layers.autonomous_expert(x[t], down[e], up[e], p[e], out[e])

        probs = float64(self.probs)
        if kind == "with norms":
            norms = np.take_along_axis(oracle.norms(x, down), self.routing.experts, axis=1)
            probs = np.exp(norms) / np.exp(norms).sum(1, keepdims=True)
        return oracle.sum_of_experts(x, self.routing.experts, probs, expert)


KINDS = ["routed", "autonomous", "autonomous, gate kept", "handed on"]


def is_whole(routing: Routing) -> bool:
    """Whether every choice has a row, and there is no padding, as experts with norms require."""
    return routing.pad_rows_per_expert is None and bool((routing.experts >= 0).all())


def cases(routings: list[Routing]) -> list[tuple[Routing, str]]:
    with_norms = [(routing, "with norms") for routing in routings if is_whole(routing)]
    return [(routing, kind) for routing in routings for kind in KINDS] + with_norms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("routing", "kind"), cases(ROUTINGS), ids=str)
def test_equals_the_oracle(ops, device, routing, kind, dtype):
    setting = Setting(routing, dtype, device)
    y = setting.compute(ops, kind)
    assert y.dtype == dtype
    assert_close(y, setting.exact(kind), dtype)


@pytest.mark.parametrize("more", [-2, 3])
@pytest.mark.parametrize(
    "routing", [each for each in SOME if not each.pad_rows_per_expert], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_number_of_rows(ops, device, routing, kind, more):
    """With more than the choices, they are computed as without; with fewer, the first of them."""
    _, rows, _ = oracle.routing_map(routing.experts, routing.num_experts)
    number = max(0, int((rows >= 0).sum()) + more)
    kept = replace(routing, experts=np.where(rows < number, routing.experts, -1))
    wanted = Setting(kept, torch.float64, device).passes(ops, kind)
    found = Setting(routing, torch.float64, device).passes(ops, kind, number)
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, float64(expected), torch.float64)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("routing", "kind"), cases(SOME), ids=str)
def test_gradcheck(ops, device, routing, kind):
    setting = Setting(routing, torch.float64, device)
    assert torch.autograd.gradcheck(
        lambda *inputs: setting.compute(ops, kind, *inputs), setting.inputs(kind), fast_mode=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("routing", "kind"), cases(ROUTINGS), ids=str)
def test_gradients_equal_those_of_the_composition(reference, native, device, routing, kind, dtype):
    setting = Setting(routing, dtype, device)
    found = gradients(setting.compute(native, kind), setting.dy, *setting.inputs(kind))
    exact = [tensor.detach().double().requires_grad_() for tensor in setting.inputs(kind)]
    wanted = gradients(setting.compute(reference, kind, *exact), setting.dy.double(), *exact)
    for actual, expected, tensor in zip(found, wanted, setting.inputs(kind), strict=True):
        assert actual.dtype == tensor.dtype
        assert_close(actual, float64(expected), dtype)


@pytest.mark.parametrize("kind", [*KINDS, "with norms"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_gradients(native, device, layout, kind):
    setting, relaid = Setting(ROUTINGS[0], torch.float64, device), LAYOUTS[layout]
    expected = gradients(setting.compute(native, kind), setting.dy, *setting.inputs(kind))
    y = setting.compute(native, kind, *map(relaid, setting.inputs(kind)))
    found = gradients(y, relaid(setting.dy), *setting.inputs(kind))
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, float64(wanted), torch.float64)


@pytest.mark.parametrize("kind", [*KINDS, "with norms"])
@pytest.mark.parametrize("name", ["many_tokens", "half_to_one"])
def test_bf16_is_as_exact_as_torchs(reference, native, device, name, kind):
    setting = Setting(BY_NAME[name], torch.bfloat16, device)
    assert_as_exact_as_torchs(setting, reference, native, kind)


def assert_as_exact_as_torchs(setting: Setting, reference: Ops, native: Ops, kind: str) -> None:
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in setting.inputs(kind)]
    exact_y = setting.compute(reference, kind, *exact_inputs)
    exact = [exact_y, *gradients(exact_y, setting.dy.double(), *exact_inputs)]
    results = []
    for ops in (native, reference):
        results.append(setting.passes(ops, kind))
    for of_native, of_reference, wanted in zip(*results, exact, strict=True):
        assert_no_worse_than_twice(of_native, of_reference, float64(wanted))


#: Experts with 450, 200, 50 and no rows.
OF_ALL_SIZES = Routing("rows_of_all_sizes", 4, np.repeat([0, 1, 2], [450, 200, 50])[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "with norms"])
def test_layers_of_each_library(reference, native, library, kind, dtype):
    assert_as_exact_as_torchs(
        Setting(OF_ALL_SIZES, dtype, "cpu", (416, 448, 32)), reference, native, kind
    )


def test_in_16_bits_at_most_four_parts_round_the_gradient_of_an_expert(native):
    """3,000 rows of one expert: 256 and then many small numbers, all with h = silu(64) / 64 = 1.

    The number is 0.8 in 500 rows, so that six parts would lose all but the first, where bf16 has
    every second number.
    """
    x, probs = torch.ones(3000, 1, dtype=torch.bfloat16), torch.ones(3000, 1)
    w_gate_up = torch.tensor([64, 1 / 64], dtype=torch.bfloat16).expand(16, 1, 2)
    w_out = torch.ones(16, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    row_map = native.routing_map(torch.zeros(3000, 1, dtype=torch.int64), 16)
    dy = torch.full_like(x, 0.8 / 500)
    dy[0] = 256
    native.routed_experts(x, probs, row_map, w_gate_up, w_out).backward(dy)
    half_of_a_step = 1
    assert abs(float(w_out.grad[0]) - float(dy.double().sum())) < 4 * half_of_a_step
    assert not bool(w_out.grad[1:].any())


def test_what_is_saved(native):
    """x, the input of SwiGLU, the row map; for AoE P and C instead, and G on request."""
    setting = Setting(BY_NAME["many_tokens"], torch.float32, "cpu")
    rows = setting.routing.experts.size
    sizes = {}
    for kind in [*KINDS, "with norms"]:
        seen: dict[int, int] = {}

        def note(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            setting.compute(native, kind)
        for given in (*setting.inputs(kind), setting.w_down):
            seen.pop(given.data_ptr(), None)
        sizes[kind] = sum(seen.values())
    row_map = 8 * (2 * rows + setting.routing.num_experts)
    assert sizes["routed"] == row_map + 4 * rows * 2 * F
    assert sizes["autonomous"] == row_map + 4 * rows * (F + R)
    assert sizes["autonomous, gate kept"] == row_map + 4 * rows * (F + R + F)
    assert sizes["handed on"] == row_map + 4 * rows * F
    assert sizes["with norms"] == row_map + 4 * rows * (F + R + 2)  # C, the norms and the probs too


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_norm_has_no_gradient(ops, device, dtype):
    setting = Setting(ROUTINGS[0], dtype, device)
    with torch.no_grad():
        setting.x[3] = 0
        setting.w_down[2] = 0
    _, dx, *others = setting.passes(ops, "with norms")
    assert all(gradient.isfinite().all() for gradient in (dx, *others))
    assert (dx[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_norms_here_have_the_gradient_of_norm_topk(native, device, dtype):
    """The same layer with the gradient of C and of the probs handed back to the selection."""
    setting = Setting(BY_NAME["half_to_one"], dtype, device)
    x, w_down, *others = inputs = setting.inputs("with norms")

    def layer(gradient_here: bool) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(not gradient_here):
            scores = native.norm_topk(x, w_down, 2, keep="chosen", gradient="chosen")
            norms = scores.norms_TE.gather(1, scores.experts_TK)
            probs = norms.softmax(-1)
        row_map = native.routing_map(
            scores.experts_TK, len(w_down), num_rows=scores.experts_TK.numel()
        )
        given = {"c_TKR": scores.c_TKR, "norms_TK": norms if gradient_here else None}
        y = native.autonomous_experts(x, probs, row_map, w_down, *others, **given)
        return (y, *gradients(y, setting.dy, *inputs))

    for here, handed_back in zip(layer(True), layer(False), strict=True):
        assert_close(here, float64(handed_back), dtype, rounded=2)


def test_norms_without_c_or_without_rows_are_refused(ops, device):
    setting = Setting(BY_NAME["dropped_choices"], torch.float32, device)
    row_map = ops.routing_map(torch.from_numpy(setting.routing.experts).to(device), 5)
    given = setting.x, setting.probs, row_map, *setting.inputs("with norms")[1:]
    with pytest.raises(ValueError, match="norms of c_TKR: give both"):
        ops.autonomous_experts(*given, norms_TK=setting.probs)
    with pytest.raises(ValueError, match=r"every choice has a row: 26 choices have \d+ rows"):
        ops.autonomous_experts(*given, c_TKR=setting.c, norms_TK=setting.probs)


def test_other_shapes_are_refused(native, device):
    setting = Setting(ROUTINGS[0], torch.float32, device)
    x, probs, w_gate_up, w_out = setting.inputs("routed")
    wrong: list[tuple[str, tuple[Tensor, ...]]] = [
        ("x has 12 tokens, the row map 13", (x[1:], probs, w_gate_up, w_out)),
        (r"probs must have shape \[13, 2\]", (x, probs[:, :1], w_gate_up, w_out)),
        (r"w_gate_up must have shape \[5, 6, 10\]", (x, probs, w_gate_up[..., :9], w_out)),
        (r"w_out must have shape \[5, 5, 6\]", (x, probs, w_gate_up, w_out[1:])),
    ]
    for message, inputs in wrong:
        with pytest.raises(ValueError, match=message):
            setting.compute(native, "routed", *inputs)
    x, probs, w_down, w_up, w_p, w_out = setting.inputs("autonomous")
    with pytest.raises(TypeError, match="w_p is Double, x is Float"):
        setting.compute(native, "autonomous", x, probs, w_down, w_up, w_p.double(), w_out)
