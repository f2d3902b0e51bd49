"""The benchmark of tiles, up to the GPU that it needs."""

import re

import pytest

from moe_parallel.ops import extension
from tests.tiers import rest_in_full
from tests.tools.bench_rows import result, row
from tools.bench.clock import CpuClock
from tools.bench.measurement import Patience, measure
from tools.bench.sizes import BenchSize
from tools.bench.tiles import KINDS, GroupedSize, bench_of, goal_products, main, products_of, rules


def test_the_products_of_a_weight_are_those_of_its_passes() -> None:
    size = BenchSize(T=10, d=4, n=3, K=2)
    product, by_transposed, outer, in_float = products_of(size, [(4, 6)])
    assert product == GroupedSize("kProduct", 3, 20, 4, 6)
    assert by_transposed == GroupedSize("kByTransposed", 3, 20, 6, 4)
    assert outer == GroupedSize("kOuter", 3, 20, 4, 6)
    assert in_float == GroupedSize("kOuterInFloat", 3, 20, 4, 6)


def test_the_goals_have_each_kind_and_every_low_rank() -> None:
    products = goal_products()
    assert len(products) == len(set(products))
    for kind in KINDS:
        widths = {product.n for product in products if product.kind == kind}
        assert {64, 128, 256, 512} <= widths


@pytest.mark.full
@pytest.mark.skipif(not extension.is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("kind", rest_in_full(KINDS, "kOuterInFloat"))
def test_a_product_is_timed_with_each_tile(kind: str) -> None:
    bench = bench_of(GroupedSize(kind, 3, 20, 16, 24), "cpu")
    (found,) = measure(bench, CpuClock(), "cpu", Patience(0.1, 2))
    assert [one.name for one in found.results] == ["square", "wide", "narrow"]
    assert all(len(one.samples) == 2 and one.differs is None for one in found.results)
    assert found.amount == 2 * 20 * 16 * 24
    module = extension.load()
    assert module.set_tiling(module.Tiling.WHERE_FASTER) == module.Tiling.NARROW


def test_the_rules_of_a_measurement() -> None:
    product, outer = (GroupedSize(kind, 8, 800, 64, 256) for kind in ("kProduct", "kOuter"))
    faster = row(result("square", 2.0), result("wide", 3.0), result("narrow", 1.0))
    within_the_noise = row(result("square", 2.0), result("wide", 1.99))
    failed = row(result("square", 2.0), result("wide", absent="failed"))
    wrong = row(result("square", 2.0), result("wide", 1.0, differs="output 0 is off"))
    assert rules([product, outer], [faster, faster]) == [
        "{ProductKind::kProduct, {50, 200}, {256, 256}, {64, 64}, Tile::kNarrow},",
        "{ProductKind::kOuter, {64, 64}, {256, 256}, {50, 200}, Tile::kNarrow},",
    ]
    assert rules([product] * 3, [within_the_noise, failed, wrong]) == []


@pytest.mark.skipif(not extension.is_built(), reason="the C++ extension is not built")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert re.search("no CUDA GPU here: .* H100 or H200", capsys.readouterr().err)
