"""The contenders of a measurement, their turns and their answers; the clock here only counts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tools.bench.measurement import (
    BACKWARD,
    BOTH,
    FEWEST_TURNS,
    FORWARD,
    MOST_TURNS,
    Absent,
    Bench,
    BenchContender,
    Measure,
    Moved,
    Patience,
    Products,
    WorkTimer,
    disagreement,
    invite,
    measure,
    peer_package,
    take_turns,
)
from tools.bench.results import BenchRow
from tools.bench.sizes import BenchSize

ONCE = Patience(0.0, turns=1)


class Counter:
    """A clock on which every call takes a second."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def timer(
        self, work: Callable[..., object], prepare: Callable[[], Sequence[Any]] = tuple
    ) -> WorkTimer:
        def seconds() -> float:
            self.results.append(work(*prepare()))
            return 1.0

        return WorkTimer(seconds, "a reason")


X = torch.ones(3, requires_grad=True)


def double(name: str, factor: float = 2.0, **options: Any) -> BenchContender:
    return BenchContender(
        name, lambda: [X * factor], {"x": X}, upstream=(torch.ones(3),), **options
    )


def rows_of(
    ours: BenchContender, *peers: BenchContender | Absent, timed: str = BOTH
) -> tuple[Counter, list[BenchRow]]:
    clock = Counter()
    bench = Bench(
        "double", BenchSize(T=3), torch.float32, [ours], peers, (Measure(timed, Moved(24)),)
    )
    return clock, measure(bench, clock, "cpu", ONCE)


def test_turns_alternate_after_a_warm_up() -> None:
    calls: list[str] = []

    def hand(name: str) -> Callable[[], float]:
        return lambda: calls.append(name) or float(len(calls))

    samples = take_turns({"a": hand("a"), "b": hand("b")}, Patience(0.0, turns=2))
    assert calls == ["a", "b"] * 3
    assert samples == {"a": [3.0, 5.0], "b": [4.0, 6.0]}  # the first turn is not counted


@pytest.mark.parametrize(
    ("one_turn", "turns"), [(1e-6, MOST_TURNS), (1.0, 10), (100.0, FEWEST_TURNS)]
)
def test_patience(one_turn: float, turns: int) -> None:
    assert Patience(10.0).turns_of(one_turn) == turns
    assert Patience(10.0, turns=3).turns_of(one_turn) == 3


@pytest.mark.full
def test_a_contender_that_differs_is_marked_and_timed() -> None:
    _, (row,) = rows_of(double("ours"), double("same"), double("other", 3.0))
    assert [r.differs is None for r in row.results] == [True, True, False]
    assert {each.name: each for each in row.results}["other"].samples == [1.0]


@pytest.mark.full
def test_what_was_no_replay_is_recorded_with_the_reason() -> None:
    _, (row,) = rows_of(double("ours"), double("same"), Absent("gone", "needs a GPU"))
    reasons = {one.name: one.without_graph for one in (row.ceiling, *row.results)}
    assert reasons == {"copy": "a reason", "ours": "a reason", "same": "a reason", "gone": None}


@pytest.mark.full
def test_another_model_is_no_difference() -> None:
    _, (row,) = rows_of(double("ours"), double("yardstick", 3.0, answer="another model"))
    assert {each.name: each for each in row.results}["yardstick"].differs is None


def test_peers_that_cannot_take_part_are_absent_with_the_reason() -> None:
    def fail() -> list[torch.Tensor]:
        raise RuntimeError("no kernel for this\nand a long trace")

    _, (row,) = rows_of(
        double("ours"), Absent("gone", "needs a GPU"), BenchContender("broken", fail)
    )
    assert {each.name: each for each in row.results}["gone"].absent == "needs a GPU"
    assert {each.name: each for each in row.results}[
        "broken"
    ].absent == "failed: RuntimeError: no kernel for this"
    assert {each.name: each for each in row.results}["broken"].samples == []


def test_our_own_failure_is_no_absence() -> None:
    def fail() -> list[torch.Tensor]:
        raise RuntimeError("broken kernel")

    with pytest.raises(RuntimeError, match="broken kernel"):
        rows_of(BenchContender("ours", fail), double("peer"))


@pytest.mark.full
@pytest.mark.parametrize("timed", [FORWARD, BACKWARD, BOTH])
def test_the_pass_that_is_timed(timed: str) -> None:
    clock, (row,) = rows_of(double("ours"), timed=timed)
    assert row.timed == timed
    last = clock.results[-1]
    if timed == FORWARD:
        assert last[0].tolist() == [2.0] * 3
    elif timed == BACKWARD:
        assert last["x"].tolist() == [2.0] * 3
    else:
        outputs, gradients = last
        assert (outputs[0].tolist(), gradients["x"].tolist()) == ([2.0] * 3, [2.0] * 3)


def test_absence_on_invitation() -> None:
    def peer(name: str, *like: torch.Tensor) -> BenchContender | Absent:
        return invite("a", lambda: peer_package(name, *like).no_such_peer)

    missing = "this peer needs no_such_package, which is not installed: pip install no_such_package"
    assert peer("no_such_package") == Absent("a", missing)
    assert peer("no_such_package", torch.zeros(1)) == Absent("a", "needs a CUDA GPU")
    other = "AttributeError: module 'json' has no attribute 'no_such_peer'"
    assert peer("json") == Absent("a", other)


def test_flops_of_products_and_their_gradients() -> None:
    products = Products(((2, 3, 5),))
    assert products.amount == 2 * 2 * 3 * 5
    assert products.with_gradients().amount == 3 * products.amount


VALUES = {"output 0": torch.tensor([1.0, -8.0]), "gradient of x": torch.tensor([0.5])}


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_rounding_is_no_difference(scale: float) -> None:
    expected = {name: value * scale for name, value in VALUES.items()}
    values = {name: value * (1 + 1e-6) for name, value in expected.items()}
    assert disagreement(values, expected, torch.float32) is None


def test_the_worst_value_is_named() -> None:
    values = VALUES | {"output 0": torch.tensor([1.0, -7.0])}  # 1/8 of the largest
    said = disagreement(values, VALUES, torch.float32)
    assert said == "output 0 is off by 1.2e-01 of its largest value"


def test_bf16_may_round_more() -> None:
    values = VALUES | {"output 0": torch.tensor([1.0, -7.9])}
    assert disagreement(values, VALUES, torch.bfloat16) is None
    assert disagreement(values, VALUES, torch.float32) is not None


def test_a_nan_differs() -> None:
    values = VALUES | {"gradient of x": torch.tensor([float("nan")])}
    assert "gradient of x is off by nan" in str(disagreement(values, VALUES, torch.float32))


def test_integers_are_equal_or_differ() -> None:
    one, other = {"experts": torch.tensor([1, 2])}, {"experts": torch.tensor([2, 1])}
    assert disagreement(one, one, torch.bfloat16) is None
    assert "experts is off by inf" in str(disagreement(one, other, torch.bfloat16))


def test_other_names_and_shapes_differ() -> None:
    fewer = {"output 0": VALUES["output 0"]}
    assert "has output 0 instead of" in str(disagreement(fewer, VALUES, torch.float32))
    reshaped = VALUES | {"gradient of x": torch.tensor([[0.5]])}
    said = disagreement(reshaped, VALUES, torch.float32)
    assert said == "gradient of x is (1, 1), not (1,)"
