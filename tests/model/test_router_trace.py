"""A trace is the same in every layout, and its replay is the run that was recorded, to the bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import systems
from tests.distributed import run_distributed
from tests.model.small_gpt import Options, Outcome, save_start, train
from tests.model.test_layouts import ONE, differences, layout, model
from tests.telemetry.traces import Arrays, change_steps, contents
from tests.tiers import rest_in_full

CP = {"context_parallel_size": 2}
#: The layouts of two ranks, with everything that changes which tokens a rank sees, and when.
LAYOUTS: dict[str, Options] = {
    "dp2": layout(),
    "tp2, sp, ep2": layout(tp=2, ep=2, sp=True),
    "tp2, recompute": layout(tp=2, etp=2, recompute=True),
    "pp2, virtual, recompute": layout(pp=2, virtual=True, recompute=True),
    "cp2, ep2": layout(ep=2) | CP,
}
#: Of the systems with choices, all that can be replayed.
SYSTEMS = tuple(name for name in systems.SYSTEMS if not systems.merges(name))
QUICK = ("topk", "aoe, by bias", "segment_expert_choice")
#: Of these, some with different rules.
SPREAD = ["topk", "expert_choice", "segment_expert_choice", "aoe, by bias", "aoe_expert_choice"]
THREE = {"train_iters": 3}  # of which the last two are recorded


class Recorded(NamedTuple):
    """A run on one rank: its start, its trace, and its results."""

    start: Path
    trace: Path
    outcome: Outcome


def options_of(system: str) -> Options:
    return model(system) | ONE | THREE


def record(options: Options, folder: Path) -> Recorded:
    trace = folder / "one"
    start = save_start(options, folder)
    return Recorded(start, trace, train(options | {"moe_router_trace": str(trace)}, start))


def record_and_replay(names: Sequence[str], folder: Path) -> list[tuple[Recorded, Outcome, Path]]:
    """Each system once recorded, and once replayed and recorded again."""
    found = []
    for number, system in enumerate(names):
        options = options_of(system)
        recorded = record(options, folder / str(number))
        again = folder / f"{number}-again"
        flags = {"moe_router_replay": str(recorded.trace), "moe_router_trace": str(again)}
        found.append((recorded, train(options | flags, recorded.start), again))
    return found


def assert_same_to_the_bit(found: Outcome, wanted: Outcome) -> None:
    assert found.losses == wanted.losses
    assert found.grad_norms == wanted.grad_norms
    assert found.layers == wanted.layers
    for (name, *_, values), (_, *_, others) in zip(found.pieces, wanted.pieces, strict=True):
        assert values.tobytes() == others.tobytes(), name


@pytest.mark.parametrize("names", rest_in_full([QUICK, SYSTEMS], QUICK), ids=len)
def test_a_replay_gives_the_same_losses_to_the_bit(tmp_path: Path, names: tuple[str, ...]) -> None:
    (found,) = run_distributed(1, record_and_replay, names, tmp_path)
    for recorded, replayed, again in found:
        assert_same_to_the_bit(replayed, recorded.outcome)
        assert contents(again) == contents(recorded.trace)


def train_all(cases: list[tuple[Options, Path]]) -> list[Outcome]:
    return [train(options, start) for options, start in cases]


#: In these a token is shared in each way: by tensor, expert, pipeline and context parallelism.
QUICK_LAYOUTS = ("tp2, sp, ep2", "pp2, virtual, recompute", "cp2, ep2")
OTHER_LAYOUTS = tuple(name for name in LAYOUTS if name not in QUICK_LAYOUTS)
CASES = {"topk": ("topk", QUICK_LAYOUTS), "topk, the others": ("topk", OTHER_LAYOUTS)} | {
    system: (system, tuple(LAYOUTS)) for system in SPREAD if system != "topk"
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_layouts_write_the_same_trace_and_replay_it(tmp_path: Path, case: str) -> None:
    system, layouts = CASES[case]
    options = options_of(system)
    (recorded,) = run_distributed(1, record, options, tmp_path)
    cases = []
    for name in layouts:
        spread = LAYOUTS[name]
        trace = {"moe_router_trace": str(tmp_path / name)}
        replay = {"moe_router_replay": str(recorded.trace)}
        cases.append((options | spread | trace, recorded.start))
        cases.append((options | spread | replay, recorded.start))
    ranks = run_distributed(2, train_all, cases)
    for number, name in enumerate(layouts):
        assert contents(tmp_path / name) == contents(recorded.trace), name
        traced, replayed = ([rank[2 * number + which] for rank in ranks] for which in (0, 1))
        assert differences({name: replayed}, [recorded.outcome]) == {}
        for ours, theirs in zip(replayed, traced, strict=True):
            assert_same_to_the_bit(ours, theirs)


def replay_others(options: Options, folder: Path) -> tuple[Outcome, Outcome]:
    """A run and a replay in which each choice is the next expert."""
    recorded = record(options, folder)

    def change(arrays: Arrays) -> None:
        experts = arrays["experts"]
        experts[:] = np.where(experts < 0, -1, (experts + 1) % 4)

    change_steps(recorded.trace, folder / "next", change)
    replayed = train(options | {"moe_router_replay": str(folder / "next")}, recorded.start)
    return recorded.outcome, replayed


def test_the_recorded_choices_are_computed_and_learn(tmp_path: Path) -> None:
    ((own, replayed),) = run_distributed(1, replay_others, options_of("top_p"), tmp_path)

    def loads(outcome: Outcome) -> list[Any]:
        return [layer["tokens_per_expert"] for layer in outcome.layers]

    files = sorted((tmp_path / "next").iterdir())
    steps = np.stack([np.load(file)["experts"] for file in files], axis=1)
    counted = [np.bincount(experts.ravel() + 1, minlength=5)[1:].tolist() for experts in steps]
    assert loads(replayed) == counted != loads(own)
    assert replayed.losses != own.losses
    routers = [np.abs(a - b).max() for (name, *_, a), (*_, b) in zip(own.pieces, replayed.pieces,
               strict=True) if "router" in name]  # fmt: skip
    assert routers and min(routers) > 0
