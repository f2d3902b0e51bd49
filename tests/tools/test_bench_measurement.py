"""The contenders of a measurement, their turns and their answers; the clock here only counts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tools.bench.measurement import (
    BACKWARD,
    BOTH,
    FORWARD,
    Absent,
    Bench,
    BenchContender,
    Measure,
    Moved,
    Patience,
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


@pytest.mark.full
def test_a_contender_that_differs_is_marked_and_timed() -> None:
    other_model = double("yardstick", 3.0, answer="another model")
    _, (row,) = rows_of(double("ours"), double("same"), double("other", 3.0), other_model)
    assert [r.differs is None for r in row.results] == [True, True, False, True]
    assert row.results[2].samples == [1.0]


def test_peers_that_cannot_take_part_are_absent_with_the_reason() -> None:
    def fail() -> list[torch.Tensor]:
        raise RuntimeError("no kernel for this\nand a long trace")

    _, (row,) = rows_of(
        double("ours"), Absent("gone", "needs a GPU"), BenchContender("broken", fail)
    )
    by_name = {each.name: each for each in row.results}
    assert by_name["gone"].absent == "needs a GPU"
    assert by_name["broken"].absent == "failed: RuntimeError: no kernel for this"
    assert by_name["broken"].samples == []


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


VALUES = {"output 0": torch.tensor([1.0, -8.0]), "gradient of x": torch.tensor([0.5])}


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_rounding_is_no_difference(scale: float) -> None:
    expected = {name: value * scale for name, value in VALUES.items()}
    values = {name: value * (1 + 1e-6) for name, value in expected.items()}
    assert disagreement(values, expected, torch.float32) is None


@pytest.mark.parametrize(
    ("changed", "dtype", "said"),
    [
        ({"output 0": torch.tensor([1.0, -7.0])}, torch.float32, "output 0 is off by 1.2e-01 of"),
        ({"output 0": torch.tensor([1.0, -7.9])}, torch.float32, "output 0 is off by"),
        ({"output 0": torch.tensor([1.0, -7.9])}, torch.bfloat16, None),
        (
            {"gradient of x": torch.tensor([torch.nan])},
            torch.float32,
            "gradient of x is off by",
        ),
        ({"gradient of x": torch.tensor([[0.5]])}, torch.float32, "gradient of x is (1, 1), not"),
        ({"more": torch.tensor([1])}, torch.float32, "has output 0, gradient of x, more instead"),
    ],
)
def test_what_differs_is_named(
    changed: dict[str, torch.Tensor], dtype: torch.dtype, said: str | None
) -> None:
    found = disagreement(VALUES | changed, VALUES, dtype)
    assert found is None if said is None else said in str(found)
