"""routed_experts and autonomous_experts: values by the oracle's loops, gradients by differences."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    PROCESSOR,
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
        first = self.c if kind == "handed on" else self.w_down
        return self.x, self.probs, first, self.w_up, self.w_p, self.w_out

    def compute(
        self,
        ops: Ops,
        kind: str,
        *inputs: Tensor,
        all_chosen: bool = False,
        main_gradients: Any = None,
        packed: Sequence[Tensor] = (),
    ) -> Tensor:
        experts = torch.from_numpy(self.routing.experts).to(self.device)
        row_map = ops.routing_map(
            experts, self.routing.num_experts, self.routing.pad_rows_per_expert, all_chosen
        )
        x, probs, *weights = inputs or self.inputs(kind)
        if kind == "routed":
            return ops.routed_experts(
                x, probs, row_map, *weights, main_gradients=main_gradients, packed=packed
            )
        if kind == "handed on":
            c, *weights = weights
            return ops.autonomous_experts(
                x,
                probs,
                row_map,
                self.w_down,
                *weights,
                c_TKR=c,
                main_gradients=main_gradients,
                packed=packed,
            )
        return ops.autonomous_experts(
            x,
            probs,
            row_map,
            *weights,
            recompute_gate=kind == "autonomous",
            main_gradients=main_gradients,
            packed=packed,
        )

    def passes(self, ops: Ops, kind: str, packed: Sequence[Tensor] = ()) -> list[Tensor]:
        """The output, and the gradient of every input."""
        y = self.compute(ops, kind, packed=packed)
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

        return oracle.sum_of_experts(x, self.routing.experts, float64(self.probs), expert)


KINDS = ["routed", "autonomous", "autonomous, gate kept", "handed on"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_equals_the_oracle(ops, device, routing, kind, dtype):
    setting = Setting(routing, dtype, device)
    y = setting.compute(ops, kind)
    assert y.dtype == dtype
    assert_close(y, setting.exact(kind), dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", SOME, ids=str)
def test_gradcheck(ops, device, routing, kind):
    setting = Setting(routing, torch.float64, device)
    assert torch.autograd.gradcheck(
        lambda *inputs: setting.compute(ops, kind, *inputs), setting.inputs(kind), fast_mode=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_gradients_equal_those_of_the_composition(reference, native, device, routing, kind, dtype):
    setting = Setting(routing, dtype, device)
    found = gradients(setting.compute(native, kind), setting.dy, *setting.inputs(kind))
    exact = [tensor.detach().double().requires_grad_() for tensor in setting.inputs(kind)]
    wanted = gradients(setting.compute(reference, kind, *exact), setting.dy.double(), *exact)
    for actual, expected, tensor in zip(found, wanted, setting.inputs(kind), strict=True):
        assert actual.dtype == tensor.dtype
        assert_close(actual, float64(expected), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs_and_gradients(native, device, layout, kind):
    setting, relaid = Setting(ROUTINGS[0], torch.float64, device), LAYOUTS[layout]
    expected = gradients(setting.compute(native, kind), setting.dy, *setting.inputs(kind))
    y = setting.compute(native, kind, *map(relaid, setting.inputs(kind)))
    found = gradients(y, relaid(setting.dy), *setting.inputs(kind))
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, float64(wanted), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_gradient(ops, device, kind):
    setting = Setting(ROUTINGS[0], torch.float64, device)
    y = setting.compute(ops, kind)
    ones = gradients(y, torch.ones_like(y), *setting.inputs(kind))
    summed = torch.autograd.grad(setting.compute(ops, kind).sum(), setting.inputs(kind))
    for actual, wanted in zip(summed, ones, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", SOME, ids=str)
def test_memory_is_read_only_after_it_was_written(native, device, routing, kind, dtype):
    """torch can fill new memory with NaN. Products take rows that no token has."""
    setting = Setting(routing, dtype, device)
    before = setting.passes(native, kind)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        after = setting.passes(native, kind)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


def _rows_of_products(setting: Setting, ops: Ops, kind: str) -> set[int]:
    """The numbers of rows that were multiplied, also as the inner size of weight gradients."""
    inputs = setting.inputs(kind)
    with torch.profiler.profile(record_shapes=True) as profiled:
        gradients(setting.compute(ops, kind), setting.dy, *inputs)
    shapes = [event.input_shapes[:2] for event in profiled.events() if event.name == "aten::mm"]
    widths = {size for weight in inputs[2:] for size in weight.shape} | set(setting.sizes)
    return {size for pair in shapes for shape in pair for size in shape} - widths


@pytest.mark.parametrize("library", ["BLAS", "ONEDNN"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_products_by_onednn_have_few_sizes(native, library, kind):
    """It compiles a product for its sizes, in up to milliseconds."""
    found = {
        dtype: _rows_of_products(
            Setting(BY_NAME["many_tokens"], dtype, "cpu", (48, 80, 144)), native, kind
        )
        for dtype in (torch.float32, torch.bfloat16)
    }
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    by_onednn = library == "ONEDNN" and has_avx512
    multiple = 16 if "amx_bf16" in PROCESSOR else 8
    assert any(rows % multiple for rows in found[torch.float32]) != by_onednn
    if has_avx512:
        assert found[torch.bfloat16] and not any(rows % multiple for rows in found[torch.bfloat16])


#: Experts with 450, 200, 50 and no rows, for widths of which packed products are made.
OF_ALL_SIZES = Routing("rows_of_all_sizes", 4, np.repeat([0, 1, 2], [450, 200, 50])[:, None])


@pytest.mark.parametrize("library", ["ONEDNN", "PACKED"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_packed_products(reference, native, library, kind, dtype):
    assert_as_exact_as_torchs(
        Setting(OF_ALL_SIZES, dtype, "cpu", (416, 448, 32)), reference, native, kind
    )


ALL_TO_ONE = Routing("many_rows_to_one", 16, np.zeros((3000, 1), dtype=np.int64))


@pytest.mark.parametrize("library", ["BLAS"], indirect=True)
@pytest.mark.parametrize(
    ("routing", "dtype", "rows"),
    [
        (BY_NAME["half_to_one"], torch.float32, 350),
        (BY_NAME["half_to_one"], torch.bfloat16, 350),
        (ALL_TO_ONE, torch.float32, 500),
        (ALL_TO_ONE, torch.bfloat16, 750),  # at most four parts, which round their sum
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_with_many_rows_is_computed_in_parts(native, library, kind, routing, dtype, rows):
    """Scratch memory is as large as the largest part."""
    found = max(_rows_of_products(Setting(routing, dtype, "cpu", (48, 80, 144)), native, kind))
    assert rows <= found < rows + (1 if dtype == torch.float32 else 32)  # bf16 may be rounded up


@pytest.mark.parametrize("kind", KINDS)
def test_traces_as_one_graph(native, device, kind):
    setting = Setting(ROUTINGS[0], torch.float32, device)
    compiled = torch.compile(
        lambda *inputs: setting.compute(native, kind, *inputs, all_chosen=True),
        fullgraph=True,
        backend="aot_eager",
    )
    y, expected = compiled(*setting.inputs(kind)), setting.compute(native, kind)
    assert torch.equal(y, expected)
    found = gradients(y, setting.dy, *setting.inputs(kind))
    for actual, wanted in zip(
        found, gradients(expected, setting.dy, *setting.inputs(kind)), strict=True
    ):
        assert torch.equal(actual, wanted)


def test_what_is_saved(native):
    """x, the input of SwiGLU, the row map; for AoE P and C instead, and G on request."""
    setting = Setting(BY_NAME["many_tokens"], torch.float32, "cpu")
    rows = setting.routing.experts.size
    sizes = {}
    for kind in KINDS:
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
    for name, inputs in {
        "w_down": (x, probs, w_down[..., 1:], w_up, w_p, w_out),
        "w_p": (x, probs, w_down, w_up, w_p[:, 1:], w_out),
        "w_out": (x, probs, w_down, w_up, w_p, w_out[..., 1:]),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            setting.compute(native, "autonomous", *inputs)
    with pytest.raises(TypeError, match="w_p is Double, x is Float"):
        setting.compute(native, "autonomous", x, probs, w_down, w_up, w_p.double(), w_out)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_without_rows_have_no_products(native, kind):
    """Sixty experts of which five have rows: as many products as five experts. In fp64 on a CPU
    each product of an expert is one of ATen's."""

    def products(spread: int) -> int:
        routing = Routing("spread", 5 * spread, spread * ROUTINGS[0].experts)
        setting = Setting(routing, torch.float64, "cpu")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            gradients(setting.compute(native, kind), setting.dy, *setting.inputs(kind))
        events = seen.key_averages()
        return sum(event.count for event in events if event.key in ("aten::mm", "aten::addmm"))

    assert products(spread=12) == products(spread=1) > 0
