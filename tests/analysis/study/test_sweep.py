"""The learning-rate sweep: its further run, the best rate, and what counts as finished."""

import math

import pytest

from moe_parallel.analysis.study.contenders import SharedFile, choose_contenders
from moe_parallel.analysis.study.folder import DIVERGED
from moe_parallel.analysis.study.sweep import Sweep, grid_of, lr_options
from moe_parallel.errors import InputError
from moe_parallel.training.signals import EXIT_DIVERGED
from tests.analysis.study_folder import SHARED

GRID = (0.001, 0.003, 0.009)


def sweep(*losses: float, further: float | None = None) -> Sweep:
    tried = Sweep(GRID, dict(zip(GRID, losses, strict=False)))
    if further is None:
        return tried
    return Sweep(GRID, {**tried.losses, tried.further: further})


@pytest.mark.parametrize(
    ("losses", "further"),
    [
        ((4.0, 4.1, 4.2), 0.0003333),  # .001^2 / .003
        ((4.2, 4.1, 4.0), 0.027),  # .009^2 / .003
        ((4.1, 4.0, 4.2), 0.001732),  # between .003 and .001
        ((4.2, 4.0, 4.1), 0.005196),  # between .003 and .009
        ((4.0, 4.1, math.inf), 0.0003333),
        ((math.inf, math.inf, math.inf), 0.0003333),  # all diverged: a lower rate
        ((4.1, 4.0), None),
    ],
)
def test_the_further_run_extends_an_edge_or_refines_the_middle(losses, further):
    assert sweep(*losses).further == further


def test_the_best_of_all_runs_is_chosen_and_an_edge_is_told():
    assert sweep(4.0, 4.1, 4.2).best is None  # the further run is missing
    beyond = sweep(4.0, 4.1, 4.2, further=3.9)
    assert (beyond.best, beyond.best_is_at_an_edge) == (0.0003333, True)
    inside = sweep(4.0, 4.1, 4.2, further=4.05)
    assert (inside.best, inside.best_is_at_an_edge) == (0.001, False)
    refined = sweep(4.1, 4.0, 4.2, further=3.9)
    assert (refined.best, refined.best_is_at_an_edge) == (0.001732, False)
    assert refined.rates == [0.001, 0.001732, 0.003, 0.009]


def test_nothing_is_best_if_all_diverged():
    assert sweep(math.inf, math.inf, math.inf, further=math.inf).best is None


def test_the_grid_is_around_the_contenders_own_rate_and_scales_the_whole_schedule():
    file = SharedFile.from_raw({**SHARED, "lr": 3e-3, "min_lr": 1e-4, "aoe:lr": 1e-3})
    topk, aoe = choose_contenders(["topk", "aoe"], file, {})
    factors = (1 / 3, 1.0, 3.0)
    assert grid_of(topk, factors) == (0.001, 0.003, 0.009)
    assert grid_of(aoe, factors) == (0.0003333, 0.001, 0.003)
    assert lr_options(topk, 0.009) == {"lr": 0.009, "min_lr": 0.0003}
    (still,) = choose_contenders(["topk"], SharedFile.from_raw({**SHARED, "lr": 0}), {})
    with pytest.raises(InputError, match="topk: --lr is 0"):
        grid_of(still, factors)


def test_divergence_has_the_exit_code_of_the_program():
    assert DIVERGED == EXIT_DIVERGED
