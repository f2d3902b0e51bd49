"""Experts within a budget: equal results, and memory that the rows of one expert do not fill."""

import pytest
import torch

from moe_parallel.ops import Ops, extension, select_backend
from moe_parallel.ops.bounded_experts import experts_of_choices, tokens_of_parts, within_budget
from tests.ops.cases import BY_NAME, Routing
from tests.ops.test_expert_rows import KINDS, SOME, F, R, Setting, cases
from tools.bench.measurement import BenchContender, peak_bytes, saved_bytes


def values_per_row(kind: str, width: int = F, rank: int = R) -> int:
    return 6 * width if kind == "routed" else 6 * width + 3 * rank


def of_rows(ops: Ops, kind: str, dtype: torch.dtype, rows: int) -> Ops:
    """`ops` with a budget for this number of rows of a `Setting`."""
    return within_budget(ops, rows * values_per_row(kind) * dtype.itemsize)


@pytest.mark.covering
@pytest.mark.parametrize("all_chosen", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("routing", "kind"), cases(SOME), ids=str)
def test_gradients_are_those_without_a_budget(ops, device, routing, kind, rows, all_chosen):
    setting = Setting(routing, torch.float64, device)
    all_chosen = all_chosen and bool((setting.routing.experts >= 0).all())
    found, expected = (
        torch.autograd.grad(
            setting.compute(each, kind, all_chosen=all_chosen), setting.inputs(kind), setting.dy
        )
        for each in (of_rows(ops, kind, torch.float64, rows), ops)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_parts_have_no_more_rows_than_fit(reference):
    def parts(name: str, most_rows: int) -> tuple[list[int], list[int]]:
        routing = BY_NAME[name]
        experts = torch.from_numpy(routing.experts)
        row_map = reference.routing_map(experts, routing.num_experts)
        assert experts_of_choices(row_map).equal(experts)
        sizes = tokens_of_parts(row_map, most_rows)
        return sizes, [int((part >= 0).sum()) for part in experts.split(sizes)]

    assert parts("all_to_one", 4) == ([3, 3, 3], [3, 3, 3])
    assert parts("plain", 5) == ([2] * 6 + [1], [4] * 6 + [2])
    sizes, rows = parts("variable_k", 6)  # 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1 choices
    assert (sizes, rows) == ([3, 1, 2, 2, 1, 2], [6, 4, 6, 5, 4, 6])
    sizes, rows = parts("variable_k", 1)  # a token is never cut
    assert (sizes, rows) == ([1] * 11, [1, 2, 3, 4, 5] * 2 + [1])


class Sized:
    """All rows at one of four experts, in sizes at which the memory of a row shows."""

    D, F, R, ROWS = 16, 64, 8, 1024

    def __init__(self, kind: str, dtype: torch.dtype, device: str) -> None:
        experts = torch.full((self.ROWS, 1), 2).numpy()
        sizes = (self.D, self.F, self.R)
        self.setting = Setting(Routing("sized", 4, experts), dtype, device, sizes)
        self.kind, self.bytes_of_a_value = kind, dtype.itemsize
        self.row = values_per_row(kind, self.F, self.R) * dtype.itemsize

    @property
    def weights(self) -> list[torch.Tensor]:
        inputs = self.setting.inputs(self.kind)
        return [each for each in inputs if each.dim() == 3 and each is not self.setting.c]

    def contender(self, ops: Ops) -> BenchContender:
        setting, kind = self.setting, self.kind
        leaves = {str(i): each for i, each in enumerate(setting.inputs(kind))}
        weights = {id(each) for each in self.weights}
        return BenchContender(
            "experts",
            lambda: [setting.compute(ops, kind)],
            leaves,
            frozenset(name for name, each in leaves.items() if id(each) in weights),
            (setting.dy,),
        )

    def per_row(self, values: int, size: int | None = None) -> int:
        """The bytes of so many values, of the rows' dtype if no other size is given, per row."""
        return self.ROWS * values * (size or self.bytes_of_a_value)

    @property
    def unavoidable(self) -> int:
        """Outputs and gradients of the rows, a few numbers for each, and gradients of weights: the
        sum, and those of one part. Products in bf16 without AVX-512 need 1 KiB of their own."""
        weights = sum(each.numel() for each in self.weights) * self.bytes_of_a_value
        return self.per_row(4 * self.D) + self.per_row(12, 8) + 2 * weights + 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_budget_only_inputs_are_kept(ops, device, kind, dtype):
    sized = Sized(kind, dtype, device)
    all_rows = sized.row * sized.ROWS
    without = saved_bytes(sized.contender(ops))
    kept = saved_bytes(sized.contender(within_budget(ops, all_rows // 8)))
    c = sized.R if kind == "handed on" else 0
    assert kept <= sized.per_row(sized.D + c) + sized.per_row(5, 8)
    assert kept < without / 2
    assert saved_bytes(sized.contender(within_budget(ops, all_rows))) == without


@pytest.mark.skipif(not extension.is_built(), reason="the C++ extension is not built")
@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_the_budget_and_what_none_can_avoid(kind, parts, dtype):
    native, sized = select_backend("native"), Sized(kind, dtype, "cpu")
    budget = sized.row * sized.ROWS // parts
    bounded = peak_bytes(sized.contender(within_budget(native, budget)), "cpu")
    assert bounded <= budget + sized.unavoidable
    assert peak_bytes(sized.contender(native), "cpu") > budget + sized.unavoidable
