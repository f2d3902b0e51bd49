"""SwiGLU and its gradient within packed products, on the CPU: the layers of test_expert_rows.py."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_parallel.ops import extension
from tests.ops.cases import Routing, assert_close, float64, of_packed_types, packs_fp32
from tests.ops.test_expert_rows import KINDS, OF_ALL_SIZES, Setting

pytestmark = pytest.mark.covering

only_packed = pytest.mark.parametrize("library", ["PACKED"], indirect=True)
of_both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

#: Rows that are whole tiles, which packed products in bf16 have with AMX. In fp32, 192 and 32 are
#: too few to pack.
OF_TILES = Routing("rows_of_tiles", 3, np.repeat([0, 1, 2], [448, 192, 32])[:, None])
#: Two choices per token. Each expert has 440 rows, and rows of padding up to whole tiles.
OF_PAIRS = Routing("pairs_of_choices", 2, np.tile([[0, 1], [1, 0]], (220, 1)), 448)


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def step_by_step(native):
    """A function that computes with nothing fused: every step reads what the one before stored."""
    module = extension.load()

    def compute(function: Callable[[], Any]) -> Any:
        before = module.set_fusing(module.Fusing.NEVER)
        try:
            return function()
        finally:
            module.set_fusing(before)

    return compute


@only_packed
@of_both_types
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", [OF_ALL_SIZES, OF_TILES, OF_PAIRS], ids=str)
def test_swiglu_within_packed_products_changes_no_bit(
    native, library, kind, dtype, routing, step_by_step
):
    """Except in the probs' gradients, summed in another order, and in AoE's dx: one sum, not two.

    oneDNN must add the 32 terms of C W_up in one order, in its products and in its blocks.
    """
    setting = Setting(routing, dtype, "cpu", (416, 448, 32))
    y, dx, dprobs, *others = setting.passes(native, kind)
    wanted_y, wanted_dx, wanted_dprobs, *wanted_others = step_by_step(
        lambda: setting.passes(native, kind)
    )
    for found, wanted in zip((y, *others), (wanted_y, *wanted_others), strict=True):
        assert torch.equal(found, wanted)
    assert_close(dprobs, float64(wanted_dprobs), torch.float32)
    assert_close(dx, float64(wanted_dx), dtype)
    assert torch.equal(dx, wanted_dx) or kind.startswith("autonomous")


@only_packed
@pytest.mark.parametrize("kind", ["routed", "handed on"])
def test_packed_products_gather_rows_with_gaps(native, library, kind):
    """As of tokens that came in one message with their gates. What lies in the gaps is not read."""
    setting = Setting(OF_PAIRS, torch.bfloat16, "cpu", (416, 448, 32))

    def in_wider_rows(tensor: Tensor) -> Tensor:
        wider = tensor.detach().new_full((*tensor.shape[:-1], tensor.size(-1) + 8), torch.nan)
        wider[..., : tensor.size(-1)] = tensor.detach()
        return wider[..., : tensor.size(-1)]

    wanted = setting.compute(native, kind)
    setting.x, setting.c = in_wider_rows(setting.x), in_wider_rows(setting.c)
    assert torch.equal(setting.compute(native, kind), wanted)


@only_packed
@of_packed_types
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_swiglu_is_within_its_product(native, library, kind, dtype, step_by_step):
    """Each such product leaves sums of a few columns, which are added to the probs' gradients."""
    setting = Setting(OF_TILES, dtype, "cpu", (416, 448, 32))

    def count_sums() -> int:
        with torch.profiler.profile() as profiled:
            setting.passes(native, kind)
        return sum(event.name == "aten::sum" for event in profiled.events())

    experts = 1 if dtype == torch.float32 else 3  # that have the rows to be packed
    assert count_sums() - step_by_step(count_sums) == experts


@only_packed
@of_both_types
@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_the_rows_of_a_panel_and_its_swiglu(
    native, library, two_threads, kind, dtype
):
    setting = Setting(OF_TILES, dtype, "cpu", (416, 96, 32))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(setting.passes(native, kind))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@only_packed
@of_packed_types
@pytest.mark.parametrize(
    ("kind", "columns"), [("routed", 448), ("autonomous", 416), ("handed on", 416 + 32)]
)
def test_what_packed_products_keep_in_the_caches(
    native, library, kind, dtype, columns, step_by_step
):
    """AoE's C W_up, and the gathered rows of C, or of x. Step by step they are tensors."""
    rows = 448
    routing = Routing("to_one", 2, np.zeros((rows, 1), dtype=np.int64))
    setting = Setting(routing, dtype, "cpu", (448, 416, 32))

    def allocated() -> int:
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profiled:
            setting.compute(native, kind)
        return sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())

    assert step_by_step(allocated) - allocated() == rows * columns * setting.x.itemsize


@only_packed
@packs_fp32
def test_the_gradients_of_w_p_and_w_down_are_one_product(native, library):
    """So few columns as W_down has here are packed only beside others: alone, ATen has them."""
    width, inner, rank, rows = 416, 448, 4, 440
    routing = Routing("to_one", 2, np.zeros((rows, 1), dtype=np.int64))
    setting = Setting(routing, torch.float32, "cpu", (width, inner, rank))
    with torch.profiler.profile(record_shapes=True) as profiled:
        setting.passes(native, "autonomous")
    by_aten = [event.input_shapes[:2] for event in profiled.events() if event.name == "aten::mm"]
    assert [[rank, rows], [rows, inner]] in by_aten  # the gradient of W_up
    assert [[width, rows], [rows, rank]] not in by_aten
