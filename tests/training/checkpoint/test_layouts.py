"""A checkpoint saved in any layout has the same weights and moments in every other layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.distributed import run_distributed
from tests.training.tiny_run import AOE, GATHERED, Layout, TinyRun
from tests.training.whole_state import Whole, assemble, held

LAYOUTS = {
    "one": Layout(),
    "distributed": Layout(distributed=True),
    "dp2-distributed": Layout(2, distributed=True),
    "tp2": Layout(2, tp=2),
    "tp2-etp2-no-sp": Layout(2, tp=2, etp=2, sp=False),
    "tp2-ep2-no-sp": Layout(2, tp=2, ep=2, sp=False),
    "ep2-distributed": Layout(2, ep=2, distributed=True),
    "etp2": Layout(2, etp=2),
    "pp2": Layout(2, pp=2),
    "pp2-vpp2-distributed": Layout(2, pp=2, vpp=2, distributed=True),
    "tp2-pp2-vpp2": Layout(4, tp=2, pp=2, vpp=2),
    "tp2-ep2-etp2-distributed": Layout(4, tp=2, ep=2, etp=2, distributed=True),
    "dp4-ep2-distributed": Layout(4, ep=2, distributed=True),
    "ep2-etp2": Layout(4, ep=2, etp=2),
    "pp2-ep2": Layout(4, pp=2, ep=2),
}
SYSTEMS: dict[str, dict[str, Any]] = {"topk": {}, "aoe": AOE}
BF16 = {"bf16": True}

# All comparisons are exact: moving values between layouts involves no arithmetic.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by layout and options, each with the tensors of the run."""
    made: dict[Any, tuple[Path, Whole]] = {}

    def make(layout: Layout, options: dict[str, Any]) -> tuple[Path, Whole]:
        key = (layout, tuple(options.items()))
        if key not in made:
            path = tmp_path_factory.mktemp("saved")
            ranks = run_distributed(layout.world, _train_and_save, layout, path, options)
            made[key] = (path, assemble(ranks))
        return made[key]

    return make


def _train_and_save(layout, path, options):
    run = TinyRun(layout, path, options=options)
    run.steps(2)
    run.save()
    rows = held(run)
    run.close()
    return rows


def _load_each(layout, paths, options):
    run = TinyRun(layout, paths[0], options=options)
    results = []
    for path in paths:
        state = run.load(path)
        results.append((state.iteration, held(run)))
    run.close()
    return results


def _load_weights(layout, path, options):
    run = TinyRun(layout, path, options=options)
    state = run.checkpointer.load(path, run.engine.chunks, None, None)
    return state.iteration, [row for row in held(run) if row[1] == "weight"]


#: Each way to split a model, for the quick tier.
SOME = ["one", "tp2-ep2-no-sp", "ep2-distributed", "etp2", "pp2-vpp2-distributed"]


def test_some_layouts_load_each_other(tmp_path):
    _check_loading(tmp_path, SOME, AOE)


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_layout_loads_every_other(tmp_path, system):
    _check_loading(tmp_path, list(LAYOUTS), SYSTEMS[system])


def _check_loading(directory: Path, layouts: list[str], options: dict[str, Any]) -> None:
    saved = _under_each(layouts, _save_own, directory, options)
    loaded = _under_each(layouts, _load_all, layouts, directory, options)
    for number, source in enumerate(layouts):
        expected = assemble(saved[source])
        for target, ranks in loaded.items():
            assert {rank[number][0] for rank in ranks} == {2}
            found = assemble([rank[number][1] for rank in ranks])
            _assert_equal(found, expected, f"{source} under {target}")


def _under_each(
    layouts: list[str], function: Callable[..., Any], *args: Any
) -> dict[str, list[Any]]:
    """The results of function(name, *args) on each rank, by the name of the layout.

    Layouts with the same number of ranks share one world of processes.
    """
    results = {}
    for world in sorted({LAYOUTS[name].world for name in layouts}):
        names = [name for name in layouts if LAYOUTS[name].world == world]
        ranks = run_distributed(world, _call_each, function, names, *args, timeout=300)
        results |= dict(zip(names, zip(*ranks, strict=True), strict=True))
    return results


def _call_each(function, names, *args):
    return [function(name, *args) for name in names]


def _save_own(name, directory, options):
    # Weights differ between the checkpoints, so that a mix-up shows.
    seed = 1 + list(LAYOUTS).index(name)
    return _train_and_save(LAYOUTS[name], directory / name, options | {"seed": seed})


def _load_all(name, sources, directory, options):
    return _load_each(LAYOUTS[name], [directory / source for source in sources], options)


SHARING = (Layout(2, cp=2, ep=2, distributed=True), Layout(4, cp=2, tp=2, etp=2))


@pytest.mark.full
@pytest.mark.parametrize("layout", SHARING)
def test_a_checkpoint_does_not_show_that_sequences_were_divided(saved, layout):
    for source, target in ((layout, Layout()), (Layout(), layout)):
        path, expected = saved(source, AOE)
        loaded = run_distributed(target.world, _load_each, target, [path], AOE)
        assert {rank[0][0] for rank in loaded} == {2}
        _assert_equal(assemble([rank[0][1] for rank in loaded]), expected, str(source))


GATHERING = ("ep2-distributed", "etp2", "tp2-ep2-no-sp", "pp2-ep2", "tp2-ep2-etp2-distributed")


@pytest.mark.full
@pytest.mark.parametrize("name", GATHERING)
@pytest.mark.parametrize("within", [False, True])
def test_w_down_is_the_same_whole_or_gathered(saved, name, within):
    """Between one rank that holds all of it and a layout, and within that layout."""
    layout = LAYOUTS[name]
    moves = [(Layout(), AOE, layout, GATHERED), (layout, GATHERED, Layout(), AOE)]
    if within:
        moves = [(layout, GATHERED, layout, AOE), (layout, AOE, layout, GATHERED)]
    for source, options, target, other_options in moves:
        path, expected = saved(source, options)
        loaded = run_distributed(target.world, _load_each, target, [path], other_options)
        assert {rank[0][0] for rank in loaded} == {2}
        _assert_equal(assemble([rank[0][1] for rank in loaded]), expected, f"{source} {options}")


@pytest.mark.full
@pytest.mark.parametrize("source", [Layout(), Layout(2, ep=2, distributed=True)])
@pytest.mark.parametrize("target", [Layout(2, tp=2), Layout(2, distributed=True)])
def test_bf16_keeps_the_fp32_weights(saved, source, target):
    path, expected = saved(source, BF16)
    assert any(what == "fp32_param" for _, what in expected)
    loaded = run_distributed(target.world, _load_each, target, [path], BF16)
    _assert_equal(assemble([rank[0][1] for rank in loaded]), expected, str(source))


@pytest.mark.full
@pytest.mark.parametrize("distributed", [False, True])
def test_between_precisions_the_fp32_values_move(saved, distributed):
    layout = Layout(2, ep=2, distributed=distributed)
    for source, target in (BF16, {}), ({}, BF16):
        path, expected = saved(layout, source)
        loaded = run_distributed(2, _load_each, layout, [path], target)
        found = assemble([rank[0][1] for rank in loaded])
        for name, what in expected:
            if what == "weight":
                numpy.testing.assert_array_equal(
                    found.get((name, "fp32_param"), found[name, "weight"]),
                    expected.get((name, "fp32_param"), expected[name, "weight"]),
                )
            elif what != "fp32_param":
                numpy.testing.assert_array_equal(found[name, what], expected[name, what])


def test_weights_load_without_an_optimizer(saved):
    path, expected = saved(LAYOUTS["ep2-distributed"], {})
    loaded = run_distributed(2, _load_weights, LAYOUTS["tp2"], path, {})
    assert loaded[0][0] == 2
    weights = {key: value for key, value in expected.items() if key[1] == "weight"}
    _assert_equal(assemble([rows for _, rows in loaded]), weights, "weights")


def _assert_equal(found: Whole, expected: Whole, source: str) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        numpy.testing.assert_array_equal(found[key], value, err_msg=f"{key} from {source}")
