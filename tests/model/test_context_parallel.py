"""Ranks that share the sequences train like one process: losses, gradient norms, loads, weights.

Chunks have two tokens on two ranks and one on four, so that segments and documents begin and end
inside of chunks and reach over several ranks.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups
from tests import systems
from tests.distributed import run_distributed
from tests.model.small_gpt import (
    SIZES,
    Options,
    Outcome,
    build,
    micro_batches,
    save_start,
    train,
)
from tests.model.test_layouts import (
    DROPPING,
    GATHERED,
    ONE,
    TOLERANCE,
    Start,
    differences,
    layout,
    model,
)
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full

CP = {"context_parallel_size": 2}
ALL_MODULES = {
    "recompute_granularity": "selective",
    "recompute_modules": "core_attn layernorm mlp moe",
}

#: The systems, and what else reads the positions of tokens or all tokens of a micro-batch.
MODELS: dict[str, Options] = {name: model(name) for name in SYSTEMS} | {
    "topk, capacity": model("topk") | DROPPING | {"moe_token_drop_policy": "position"},
    "aoe, capacity": model("aoe") | DROPPING | {"moe_pad_expert_input_to_capacity": True},
    "topk, own documents": model("topk") | {"reset_attention_mask": True},
    "topk, forced": model("topk") | {"moe_router_force_routing": "zipf:1.0"},
}

#: What is on beside context parallelism, by the model; the others have nothing.
BESIDE: dict[str, Options] = {
    "topk, capacity": layout(ep=2, distributed=True, overlap=True),
    "topk, own documents": layout() | ALL_MODULES,
    "aoe": layout(ep=2) | GATHERED,
    "aoe, capacity": layout(ep=2, recompute=True),
    "top_p": layout(etp=2, distributed=True),
    "lory_prefix": layout(recompute=True, distributed=True),
    "expert_choice": layout(ep=2, recompute=True),
    "aoe_expert_choice": layout(ep=2) | GATHERED,
}

QUICK = ("topk, capacity", "aoe", "lory")

Begin = Callable[[tuple[str, ...]], dict[str, Start]]


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Starts of models by name, with the steps of one process from there."""

    @functools.cache
    def of(names: tuple[str, ...]) -> dict[str, Start]:
        cases = {name: MODELS[name] | ONE for name in names}
        (made,) = run_distributed(1, _begin, cases, tmp_path_factory.mktemp("start"))
        return {name: Start(path, [outcome]) for name, (path, outcome) in made.items()}

    return of


def _begin(cases: dict[str, Options], folder: Path) -> dict[str, tuple[Path, Outcome]]:
    found = {}
    for number, (name, options) in enumerate(cases.items()):
        checkpoint = save_start(options, folder / str(number))
        found[name] = checkpoint, train(options, checkpoint)
    return found


def _train(cases: dict[str, tuple[Path, Options]]) -> dict[str, Outcome]:
    return {name: train(options, checkpoint) for name, (checkpoint, options) in cases.items()}


def _check(world: int, starts: dict[str, Start], layouts: dict[str, Options]) -> None:
    cases = {
        name: (starts[name].checkpoint, MODELS[name] | spread) for name, spread in layouts.items()
    }
    ranks = run_distributed(world, _train, cases)
    for name in cases:
        found = {name: [rank[name] for rank in ranks]}
        assert differences(found, starts[name].on_one_rank) == {}


@pytest.mark.parametrize(
    "names",
    rest_in_full([QUICK, tuple(name for name in MODELS if name not in QUICK)], QUICK),
    ids=len,
)
def test_two_ranks_share_the_sequences(begin: Begin, names: tuple[str, ...]) -> None:
    _check(2, begin(names), {name: BESIDE.get(name, ONE) | CP for name in names})


FOUR: dict[str, Options] = {
    "topk": layout(tp=2, ep=2, sp=True, distributed=True) | CP,
    "topk, own documents": layout(tp=2, etp=2) | CP,
    "topk, forced": layout(ep=4) | {"context_parallel_size": 4},
    "aoe": layout(tp=2, etp=2, sp=True) | CP,
    "aoe, by bias": layout(pp=2, virtual=True, overlap=True, distributed=True) | CP,
    "aoe, capacity": layout(ep=2, distributed=True) | CP,
    "aoe_expert_choice": layout(tp=2, ep=4, sp=True, recompute=True) | CP,
    "lory": layout(tp=2, etp=2, sp=True) | CP,
    "lory_prefix": layout() | {"context_parallel_size": 4},
    "smear": layout(tp=2, etp=2) | CP,
    "segment_expert_choice": layout(tp=2, sp=True) | CP,
}


@pytest.mark.full
def test_four_ranks_share_them_with_every_other_parallelism(begin: Begin) -> None:
    _check(4, begin(tuple(FOUR)), FOUR)


def _losses(options: Options) -> list[float]:
    """Of two steps from the initial weights and the first random states."""
    config = make_config(SIZES | options)
    engine = build(config)
    losses = [engine.step(micro_batches(config, 4 * step, engine)).lm_loss for step in range(2)]
    destroy_groups()
    return losses


@pytest.mark.full
def test_ranks_that_merge_for_the_same_segment_drop_the_same_experts() -> None:
    options = model("smear") | {"smear_expert_dropout": 0.5}
    (whole,) = run_distributed(1, _losses, options)
    for losses in run_distributed(2, _losses, options | CP):
        assert losses == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_capacity_counts_over_the_stretches_of_tensor_parallelism(
    begin: Begin, policy: str
) -> None:
    """Layouts with the same tp drop the same choices, whatever their cp."""
    name = "topk, capacity"
    options = MODELS[name] | {"moe_token_drop_policy": policy}
    start = begin((name,))[name].checkpoint
    whole, shared = (
        run_distributed(2 * cp, _train, {name: (start, options | spread)})
        for cp, spread in ((1, layout(tp=2, etp=2)), (2, layout(tp=2, ep=2, sp=True) | CP))
    )
    assert all(layer["tokens_dropped"] > 0 for layer in whole[0][name].layers)
    found = {name: [rank[name] for rank in shared]}
    assert differences(found, [rank[name] for rank in whole]) == {}


def test_every_system_is_tried() -> None:
    assert {systems.options(name)["expert_selection"] for name in SYSTEMS} <= {
        options["expert_selection"] for options in MODELS.values()
    }
