"""pack_weights: the layout of its copies, and the operators on experts that read them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.cases import Routing, float64, packs, random_tensor
from tests.ops.test_expert_rows import KINDS, OF_ALL_SIZES, Setting

only_packed = pytest.mark.parametrize("library", ["PACKED"], indirect=True)

#: Rows that are whole tiles, as AMX wants them; the last expert has too many to be packed.
OF_TILES = Routing("rows_of_tiles", 4, np.repeat([0, 1, 2, 3], [448, 32, 896, 1056])[:, None])
#: Widths of a token, between the products, and of C. All sums are long enough to be packed, and
#: panels of 128 columns end within W_g, or do not.
WIDTHS = [(416, 448, 384), (800, 512, 384)]


@pytest.fixture
def device() -> str:
    return "cpu"


def blocks(matrix: np.ndarray) -> np.ndarray:
    """Panels of 128 columns; in each, blocks of 768 rows, of which two lie side by side."""
    panels = [matrix[:, first : first + 128] for first in range(0, matrix.shape[1], 128)]
    return np.concatenate(
        [
            panel[k : k + 768].reshape(-1, 2, panel.shape[1]).swapaxes(1, 2).ravel()
            for panel in panels
            for k in range(0, len(panel), 768)
        ]
    )


def views(outer: int) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "contiguous": lambda w: w,
        "transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
        "gaps": lambda w: torch.cat([w, w], dim=2)[..., :outer],
        "no dense rows": lambda w: torch.stack([w, w], dim=3)[..., 0],
    }


@packs
@only_packed
@pytest.mark.parametrize("layout", views(0))
@pytest.mark.parametrize(
    ("inner", "outer", "parts"), [(416, 448, 1), (800, 512, 2), (1568, 320, 2), (384, 96, 3)]
)
def test_copies_consist_of_blocks(native, library, inner, outer, parts, layout):
    w = random_tensor(3, inner, outer, dtype=torch.bfloat16, device="cpu", seed=0)
    of_w, of_transpose = native.pack_weights(views(outer)[layout](w), parts)
    exact = float64(w)
    for e, matrix in enumerate(exact):
        side_by_side = [blocks(part) for part in np.split(matrix, parts, axis=1)]
        assert np.array_equal(float64(of_w[e]), np.concatenate(side_by_side))
        if outer >= 384:
            assert np.array_equal(float64(of_transpose[e]), blocks(matrix.T))
    assert of_transpose.shape == (3, inner * outer if outer >= 384 else 0)


@pytest.mark.parametrize("library", ["ONEDNN", "PACKED"], indirect=True)
@pytest.mark.parametrize(
    ("change", "is_packed"),
    [
        ({}, True),
        ({"inner": 352}, False),
        ({"inner": 417}, False),  # of pairs
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
    ],
    ids=str,
)
@packs
def test_copies_are_empty_where_products_do_not_read_them(native, library, change, is_packed):
    given = {"inner": 416, "dtype": torch.bfloat16} | change
    w = torch.ones(3, given["inner"], 96, dtype=given["dtype"])
    of_w, of_transpose = native.pack_weights(w)
    packed = is_packed and library == "PACKED"
    assert of_w.shape == (3, given["inner"] * 96 if packed else 0)
    assert of_transpose.shape == (3, 0)  # its sums have 96 terms


def packed_weights(ops, setting: Setting, kind: str) -> list[Tensor]:
    if kind == "routed":
        return [*ops.pack_weights(setting.w_gate_up, 2), *ops.pack_weights(setting.w_out)]
    weights = (setting.w_up, setting.w_p, setting.w_out)
    return [copy for w in weights for copy in ops.pack_weights(w)]


@only_packed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("routing", "widths"), [(OF_TILES, WIDTHS[0]), (OF_ALL_SIZES, WIDTHS[1])], ids=str
)
def test_packed_weights_change_no_bit(native, library, kind, routing, widths):
    setting = Setting(routing, torch.bfloat16, "cpu", widths)
    with_copies = setting.passes(native, kind, packed_weights(native, setting, kind))
    for found, wanted in zip(with_copies, setting.passes(native, kind), strict=True):
        assert torch.equal(found, wanted)


@packs
@only_packed
@pytest.mark.parametrize(
    ("kind", "widths"),
    [("routed", WIDTHS[0]), *((kind, WIDTHS[1]) for kind in KINDS)],
    ids=str,
)
def test_experts_read_the_copies(native, library, kind, widths):
    """With copies of other weights, the output and the gradients of the rows are those of these.

    As far as products read them: not with more rows than are packed, and not for W_g and W_p
    together if a panel has columns of both.
    """
    together = kind != "routed" or widths[1] % 128 == 0
    rows = [448, 32, 896 if together else 768]
    routing = Routing("of_tiles", 3, np.repeat([0, 1, 2], rows)[:, None])
    setting, other = (Setting(routing, torch.bfloat16, "cpu", widths) for _ in range(2))
    with torch.no_grad():
        for name in ("w_gate_up", "w_out", "w_up", "w_p"):
            getattr(other, name).mul_(-0.75)
    found = setting.passes(native, kind, packed_weights(native, other, kind))
    wanted = other.passes(native, kind)
    own = setting.passes(native, kind)
    for name, of_copies, of_other, of_own in zip(
        ("y", "dx", "dprobs"), found, wanted, own, strict=False
    ):
        if name == "dx" and kind == "autonomous":
            continue  # it has a part of W_down, which is not packed
        assert torch.equal(of_copies, of_other), name
        assert not torch.equal(of_copies, of_own), name


@packs
@only_packed
def test_threads_share_the_experts(native, library, two_threads):
    w = random_tensor(5, 416, 448, dtype=torch.bfloat16, device="cpu", seed=0)
    by_two = native.pack_weights(w, 2)
    torch.set_num_threads(1)
    for found, wanted in zip(by_two, native.pack_weights(w, 2), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_copies_are_taken(native, reference, kind):
    """Those in fp32, and of the reference."""
    setting = Setting(OF_ALL_SIZES, torch.float32, "cpu", (6, 5, 3))
    for ops in (native, reference):
        packed = packed_weights(ops, setting, kind)
        assert {tuple(copy.shape) for copy in packed} == {(OF_ALL_SIZES.num_experts, 0)}
        found, wanted = setting.passes(ops, kind, packed), setting.passes(ops, kind)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_parts_have_equal_widths(native):
    with pytest.raises(ValueError, match="w has 5 columns: 2 parts have no equal width"):
        native.pack_weights(torch.ones(3, 4, 5), 2)


@pytest.mark.parametrize(("kind", "count"), [("routed", 4), ("autonomous", 6)])
def test_a_list_of_another_length_is_refused(native, kind, count):
    setting = Setting(OF_ALL_SIZES, torch.float32, "cpu", (6, 5, 3))
    packed = packed_weights(native, setting, kind)[1:]
    with pytest.raises(ValueError, match=f"packed must have {count} tensors or none, not"):
        setting.compute(native, kind, packed=packed)


@packs
@only_packed
def test_copies_of_another_size_are_refused(native, library):
    setting = Setting(OF_TILES, torch.bfloat16, "cpu", WIDTHS[0])
    packed = packed_weights(native, setting, "routed")
    packed[0] = packed[0][:, :-2]
    with pytest.raises(ValueError, match="packed must have shape .*4, 372736.*, not .*4, 372734"):
        setting.compute(native, "routed", packed=packed)
