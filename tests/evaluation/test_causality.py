"""The causality probe, on functions with known leaks and on every system.

The expected leaks of a new system, if it has any, are a line in LEAKS.
"""

from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.errors import InputError
from moe_parallel.evaluation.causality import Influence, logits_of_gpt, measure_influence
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.standalone import standalone_config, standalone_model
from tests import systems
from tests.distributed import run_distributed
from tests.program import flags
from tests.systems import options
from tests.tiers import rest_in_full, selected_values

VOCABULARY, INSTANCES, POSITIONS = 50, 2, 8
INSIDE = INSTANCES * POSITIONS * (POSITIONS - 1) // 2  # (later, earlier) pairs
BETWEEN = INSTANCES * POSITIONS * (INSTANCES - 1) * POSITIONS

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "seq_length": POSITIONS,
    "micro_batch_size": INSTANCES,
    "global_batch_size": INSTANCES,
}


class Seen(NamedTuple):
    """The kinds of leaks: from later positions of an instance, and from other instances."""

    future: bool
    across: bool


SOUND = Seen(future=False, across=False)
MIXED = Seen(future=True, across=True)
MIXED_IN_ORDER = Seen(future=False, across=True)
AHEAD = Seen(future=True, across=False)

FULL = {"moe_expert_capacity_factor": 1.0}  # experts drop choices
BY_POSITION = FULL | {"moe_token_drop_policy": "position"}
SEGMENT = 3  # of 8 positions, so that the last segment is short

SYSTEMS: dict[str, dict[str, Any]] = {name: options(name) for name in systems.SYSTEMS} | {
    "dense": {"num_experts": None},
    "topk, drop by gate": FULL,
    "aoe, drop by gate": options("aoe") | FULL,
    "topk, drop by position": BY_POSITION,
    "top1, drop by position": BY_POSITION | {"moe_router_topk": 1},
    "topk, room for all": {"moe_expert_capacity_factor": 4.0},
}
#: What is seen in training and in evaluation. In all other systems nothing is.
LEAKS = {
    # The first segment merges for itself; the mean over the segment affects all its tokens.
    "lory": (AHEAD, AHEAD),
    "lory_prefix": (AHEAD, AHEAD),
    "smear": (AHEAD, AHEAD),
    # Experts choose among all tokens of a micro-batch; in evaluation tokens choose experts.
    "expert_choice": (MIXED, SOUND),
    "aoe_expert_choice": (MIXED, SOUND),
    "segment_expert_choice": (MIXED, AHEAD),
    # A token with larger probs takes the slot of an earlier token.
    "topk, drop by gate": (MIXED, MIXED),
    "aoe, drop by gate": (MIXED, MIXED),
    # First choices precede the second choices of earlier tokens ...
    "topk, drop by position": (MIXED, MIXED),
    # ... so with one choice per token no later token takes a place. But instances compete for the
    # places in an expert that they share.
    "top1, drop by position": (MIXED_IN_ORDER, MIXED_IN_ORDER),
}
MODES = ("training", "evaluation")


def random_tokens() -> torch.Tensor:
    shape = (INSTANCES, POSITIONS)
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def measure_systems(wanted: list[dict[str, Any]]) -> list[dict[str, Influence]]:
    """The results of the probe for the initial weights of each system, by mode."""
    found = []
    for of_system in wanted:
        config = standalone_config(flags(SIZES | of_system))
        groups = initialize_groups(config.parallel)
        model_parallel_cuda_manual_seed(config.training.seed)
        model, _ = standalone_model(config, VOCABULARY, groups)
        model.double()
        by_mode = {}
        for mode in MODES:
            model.train(mode == "training")
            by_mode[mode] = measure_influence(logits_of_gpt(model), random_tokens(), VOCABULARY)
        found.append(by_mode)
        destroy_groups()
    return found


# A system of each kind of selection, and each way to see what is ahead or beside.
QUICK = (
    "topk, sigmoid, groups, bias, shared expert", "top_p, a moving p", "hash", "aoe, free experts",
    "aoe_top_p", "uoe",
    "threshold", "routing_free", "lory", "lory_prefix", "segment_expert_choice", "expert_choice",
    "smear", "topk, drop by position", "top1, drop by position", "aoe, drop by gate",
    "topk, room for all",
)  # fmt: skip


@pytest.fixture(scope="module")
def influences(request: pytest.FixtureRequest) -> dict[str, dict[str, Influence]]:
    """By system, of those that this session tests."""
    names = sorted({*QUICK, *selected_values(request, "name", SYSTEMS)})
    (found,) = run_distributed(1, measure_systems, [SYSTEMS[name] for name in names])
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", rest_in_full(SYSTEMS, *QUICK))
def test_a_system_leaks_as_it_must(
    influences: dict[str, dict[str, Influence]], name: str, mode: str
) -> None:
    influence = influences[name][mode]
    expected = LEAKS.get(name, (SOUND, SOUND))[MODES.index(mode)]
    assert Seen(bool(influence.future), bool(influence.across)) == expected
    assert influence.felt == INSTANCES * POSITIONS
    assert (influence.future_pairs, influence.across_pairs) == (INSIDE, BETWEEN)
    # Measured: rounding is exactly 0, leaks are at least 5e-6, the tolerance is 3e-11.
    leaks = influence.future + influence.across
    assert influence.noise < 0.01 * influence.tolerance
    assert all(leak.change > 100 * influence.tolerance for leak in leaks)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *[(name, mode) for name in ("lory", "lory_prefix") for mode in MODES],
        ("segment_expert_choice", "evaluation"),
    ],
)
def test_the_first_segment_sees_itself_and_no_other_sees_ahead(
    influences: dict[str, dict[str, Influence]], name: str, mode: str
) -> None:
    leaks = influences[name][mode].future
    assert len(leaks) == INSTANCES * SEGMENT * (SEGMENT - 1) // 2
    assert all(leak.source.position < SEGMENT for leak in leaks)


# Functions of tokens; their leaks can be counted by hand.


def one_hot(tokens_BS: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens_BS, VOCABULARY).double()


def past(tokens_BS: torch.Tensor) -> torch.Tensor:
    return one_hot(tokens_BS).cumsum(1)


def slightly_ahead(tokens_BS: torch.Tensor) -> torch.Tensor:
    """Sees the future with 1e-8 of the size of the logits."""
    return past(tokens_BS) + 1e-7 * one_hot(tokens_BS).sum(1, keepdim=True)


def neighbors(tokens_BS: torch.Tensor) -> torch.Tensor:
    """A function of the past and of the same positions of other instances."""
    return past(tokens_BS) + 0.1 * past(tokens_BS).sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("function", "inside", "between"),
    [
        (past, 0, 0),
        (slightly_ahead, INSIDE, 0),
        (neighbors, 0, INSTANCES * POSITIONS * (POSITIONS + 1) // 2),
    ],
)
def test_leaks_are_counted(function: Any, inside: int, between: int) -> None:
    influence = measure_influence(function, random_tokens(), VOCABULARY)
    assert (len(influence.future), len(influence.across)) == (inside, between)
    assert influence.felt == INSTANCES * POSITIONS
    assert influence.noise == 0.0


def test_every_pass_draws_the_same_random_numbers() -> None:
    def noisy(tokens_BS: torch.Tensor) -> torch.Tensor:
        return past(tokens_BS) * torch.rand(POSITIONS, 1)

    torch.manual_seed(5)
    assert not measure_influence(noisy, random_tokens(), VOCABULARY).future
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_a_model_that_changes_meanwhile_is_refused() -> None:
    calls = iter(range(1000))
    with pytest.raises(InputError, match="different outputs for the same tokens"):
        measure_influence(lambda t: past(t) + next(calls), random_tokens(), VOCABULARY)
