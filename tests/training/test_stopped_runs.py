"""After a stop at any moment, metrics.jsonl and TensorBoard end as in an undisturbed run."""

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_parallel.telemetry.metrics import TIMING
from moe_parallel.training.signals import EXIT_INTERRUPTED
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, pretrain_here, small_data
from tests.training.stopped_runs import kill, terminate, with_moments

pytestmark = pytest.mark.full

# The intervals rarely coincide, and none divides the number of iterations.
RUN = SMALL | {
    "train_iters": 11,
    "log_interval": 3,
    "eval_interval": 2,
    "save_interval": 4,
    "tensorboard": True,
}
ITERATIONS = RUN["train_iters"]


def records(save: Path) -> list[dict]:
    """Every line, without the measurements of the machine."""
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def charts(save: Path) -> dict:
    """Every scalar of TensorBoard as [(iteration, value)], without those of the machine."""
    everything = {"scalars": 0, "histograms": 0}
    events = EventAccumulator(str(save / "tensorboard"), size_guidance=everything).Reload()
    machine = {f"train/{name}" for name in TIMING}
    tags = events.Tags()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in set(tags["scalars"]) - machine
        if not tag.startswith("machine/")
    }
    for tag in tags["histograms"]:
        found[tag] = [(event.step, event.histogram_value) for event in events.Histograms(tag)]
    return found


def assert_same(save: Path, straight: Path) -> None:
    assert records(save) == records(straight)
    assert charts(save) == charts(straight)


def test_the_records_of_a_run(straight):
    """Each record occurs once: a line every 3 iterations and at the end, and evaluations."""
    _, save, _ = straight
    found = [(r["iteration"], "validation" in r) for r in records(save)]
    logged = [(n, False) for n in (3, 6, 9, ITERATIONS)]
    evaluated = [(n, True) for n in (2, 4, 6, 8, 10, ITERATIONS)]
    assert found == sorted(logged + evaluated)


def go_on(options: dict) -> int:
    """Restart until the run is finished, like a batch system; returns the number of starts."""
    for starts in range(1, 2 * ITERATIONS):
        save = options["save"]
        saved = (save / "latest_checkpointed_iteration.txt").exists()
        pretrain_here([options | ({"load": save} if saved else {})])
        if (save / "run.png").exists():
            return starts
    raise AssertionError("the run does not come to its end")


def disturb(
    options: dict, straight: Path, folder: Path, moments: dict[int, str], action=kill
) -> None:
    """On a rank: stop at each moment, continue, compare."""
    for number, name in moments.items():
        here = options | {"save": folder / f"stopped-{number}"}
        names, code = with_moments(here, number, action)
        assert code in (None, EXIT_INTERRUPTED), (number, name)
        assert names[number] == name
        go_on(here)
        try:
            assert_same(here["save"], straight)
        except AssertionError as error:
            raise AssertionError(f"stopped at moment {number}, {name}: {error}") from error
        shutil.rmtree(here["save"])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(options, the folder of an undisturbed run, the names of its moments)."""
    folder = tmp_path_factory.mktemp("straight")
    options = RUN | small_data(folder)
    save = folder / "run"
    ((names, code),) = run_distributed(1, with_moments, options | {"save": save}, None)
    assert code == 0
    return options, save, names


def moments_of(names: list[str], iteration: int) -> dict[int, str]:
    """The moments from the middle of a step to the step of the next iteration."""
    steps = [number for number, name in enumerate(names) if name == "before Engine.step"]
    return {number: names[number] for number in range(steps[iteration - 1] + 1, steps[iteration])}


def last_of_kind(names: list[str]) -> dict[int, str]:
    return {number: name for name, number in {name: n for n, name in enumerate(names)}.items()}


def one_cycle(names: list[str]) -> dict[int, str]:
    """The moments from iteration 5 to 8, in which each of the three intervals ends, and the end."""
    cycle = {n: name for i in range(5, 9) for n, name in moments_of(names, i).items()}
    return dict(sorted((cycle | last_of_kind(names)).items()))


@pytest.mark.parametrize("part", range(2))
def test_kill_at_every_moment(straight, tmp_path, part):
    options, save, names = straight
    chosen = dict(list(one_cycle(names).items())[part::2])
    run_distributed(1, disturb, options, save, tmp_path, chosen, timeout=600)


def test_signal_at_every_third_moment(straight, tmp_path):
    options, save, names = straight
    # Nothing listens any more at the last moment.
    chosen = dict(list(one_cycle(names).items())[:-1:3])
    run_distributed(1, disturb, options, save, tmp_path, chosen, terminate, timeout=600)


SYSTEMS = {
    "experts on two ranks": {"expert_model_parallel_size": 2, "moe_z_loss_coeff": 1e-3},
    "AoE, dense first": AOE | {"moe_dense_warmup_percent": 40, "bf16": True},
    "merged": {"expert_selection": "smear", "smear_sees_the_future": True},
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_two_iterations_at_a_time(tmp_path, system):
    """Two ranks: averages over three iterations and over all ranks equal those without a stop."""
    options = RUN | SYSTEMS[system] | small_data(tmp_path)
    run_distributed(2, pretrain_here, [options | {"save": tmp_path / "straight"}])
    stopped = options | {"save": tmp_path / "stopped", "exit_interval": 2}
    assert run_distributed(2, go_on, stopped, timeout=300) == [6, 6]
    assert_same(tmp_path / "stopped", tmp_path / "straight")
