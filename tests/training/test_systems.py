"""Every system in the complete program: it learns, resumes bit for bit, and can change layout."""

import json
import math
import shutil
from pathlib import Path

import pytest

from moe_parallel.config import AutonomousSelection, make_config
from moe_parallel.systems import SELECTIONS, RoutingFreeSelection, UoESelection
from moe_parallel.systems.threshold import Cutoffs
from moe_parallel.systems.top_p import DynamicChoices
from tests import systems
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full

STEPS = 6
RUN = SMALL | {"train_iters": STEPS, "lr_warmup_iters": 1, "lr": 2e-2}
#: Options that also depend on random numbers.
CHANCE = {"topk": {"moe_input_jitter_eps": 0.1}, "smear": {"smear_expert_dropout": 0.3}}
EVALUATIONS = {"aoe": {"eval_first_part": 7}}


def options_of(system: str, data: dict, save: Path) -> dict:
    """Every other system uses bf16 with the distributed optimizer; some use recomputation."""
    number = list(SYSTEMS).index(system)
    kind = "tensor" if systems.merges(system) else "expert"
    options = RUN | systems.options(system) | CHANCE.get(system, {}) | data
    options |= EVALUATIONS.get(system, {})
    options |= {f"{kind}_model_parallel_size": 2}
    options |= {"bf16": number % 2 == 0, "use_distributed_optimizer": number % 2 == 0}
    if number % 3 == 0:
        options |= {"recompute_granularity": "full"}
    return options | {"save": save}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


#: One system of each family, in the quick tier.
QUICK = ["aoe, by bias"]


def group_of(system: str) -> list[str]:
    """The systems whose runs are made together."""
    return QUICK if system in QUICK else [name for name in SYSTEMS if name not in QUICK]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """By system: (options, output) of a run, of its first half, and of the second half."""
    return Lazily(lambda system: run_all(group_of(system), tmp_path_factory.mktemp("runs"), data))


class Lazily(dict):
    """Filled by `make(key)` with a missing key, and with others, when that key is accessed."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __missing__(self, key):
        self |= self.make(key)
        return self[key]


def run_all(group: list[str], folder: Path, data: dict) -> dict:
    plan = {}
    for number, system in enumerate(group):
        straight = options_of(system, data, folder / f"{number}-straight")
        halves = straight | {"save": folder / f"{number}-halves"}
        first = halves | {"exit_interval": STEPS // 2}
        plan[system] = [straight, first, halves | {"load": halves["save"]}]
    ends = run_distributed(
        2, pretrain_here, [each for three in plan.values() for each in three], timeout=400
    )
    assert {code for of_rank in ends for code, _ in of_rank} == {0}
    printed = iter(text for _, text in ends[0])
    return {
        system: [(options, next(printed)) for options in three] for system, three in plan.items()
    }


def _records(options: dict) -> list[dict]:
    lines = (options["save"] / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _losses(options: dict) -> list[float]:
    return [record["lm_loss"] for record in _records(options) if "lm_loss" in record]


@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, *QUICK))
def test_it_learns(runs, system):
    losses = _losses(runs[system][0][0])
    assert losses[0] == pytest.approx(math.log(300), abs=0.5)  # a vocabulary of 300
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, *QUICK))
def test_halves_make_a_whole(runs, system):
    (straight, _), _, (halves, _) = runs[system]
    assert _losses(halves) == _losses(straight)
    ends = [options["save"] / f"iter_{STEPS:07d}" for options in (straight, halves)]
    assert same_bytes(*map(stored_tensors, ends))


def _evaluations(options: dict) -> list[tuple[str, float]]:
    *_, last = (record["validation"] for record in _records(options) if "validation" in record)
    return [(domain, measures["loss"]) for domain, measures in last.items()]


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
    """By system: a copy of the run without its evaluations; one rank that holds everything repeats
    the last evaluation there."""
    return Lazily(lambda system: evaluate(group_of(system), runs, tmp_path_factory.mktemp("alone")))


def evaluate(group: list[str], runs: dict, folder: Path) -> dict:
    plan = []
    for number, system in enumerate(group):
        options = runs[system][0][0]
        copy = shutil.copytree(options["save"], folder / str(number))
        lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if "validation" not in json.loads(line)]
        (copy / "metrics.jsonl").write_text("".join(kept))
        one = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
        plan.append(options | one | {"load": copy, "save": copy})
    ends = run_distributed(1, pretrain_here, plan, timeout=300)
    assert {code for code, _ in ends[0]} == {0}
    return dict(zip(group, plan, strict=True))


@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, *QUICK))
def test_a_checkpoint_of_two_ranks_is_the_same_model_on_one(runs, alone, system):
    options = runs[system][0][0]
    tolerance = 2e-3 if options["bf16"] else 1e-5
    for here, there in zip(_evaluations(alone[system]), _evaluations(options), strict=True):
        assert here[0] == there[0]
        assert here[1] == pytest.approx(there[1], rel=tolerance)


@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, *QUICK))
def test_what_is_logged(runs, system):
    options = runs[system][0][0]
    selection = make_config(systems.options(system)).selection
    ranks_by_norms = isinstance(selection, AutonomousSelection | UoESelection)
    trained = [layer for r in _records(options) for layer in r.get("layers", [])]
    if selection.controlled is not None:
        settings = [r[selection.controlled] for r in _records(options) if "lm_loss" in r]
        assert len(set(settings)) > 1 and min(settings) > 0
    assert len(trained) == STEPS * RUN["num_layers"]
    for layer in trained:
        assert 0 <= layer["ent_load"] <= math.log(4) + 1e-9
        assert 0 < layer["ent_conf"] <= math.log(4) + 1e-9
        choices = selection.choices_per_token
        if choices is not None:
            computed = choices * (1 - layer.get("free_share", 0))
            assert layer["experts_per_token"] == pytest.approx(computed)
        assert "free_share" not in layer or selection.free_experts
        if isinstance(selection, DynamicChoices):
            assert 1 <= layer["experts_per_token"] <= 4
            assert 0 < layer["entropy_loss"] <= math.log(4) + 1e-6
        assert ("norm_per_expert" in layer) == ranks_by_norms
        assert ("cutoff_per_expert" in layer) == isinstance(
            selection, Cutoffs | RoutingFreeSelection
        )
        assert ("routing_weight_per_expert" in layer) == systems.merges(system)
        if systems.merges(system):
            assert sum(layer["routing_weight_per_expert"]) == pytest.approx(1)
            assert 0 <= layer["utilisation"] <= 1
        balanced = getattr(selection, "moe_aux_loss_coeff", 0) > 0
        assert ("load_balancing_loss" in layer) == balanced
    *_, last = (r["validation"] for r in _records(options) if "validation" in r)
    for measures in last.values():
        later = selection.first_part is not None or "eval_first_part" in options
        assert ("loss_after_first_part" in measures) == later
        for layer in measures["layers"]:  # a few steps may leave all tokens to free experts
            assert layer["experts_per_token"] > 0 or layer["free_share"] == 1


def test_every_system_is_here():
    assert {name.split(",")[0] for name in SYSTEMS} == set(SELECTIONS)
