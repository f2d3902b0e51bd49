"""Ranks that share the sequences train like one process: losses, gradient norms, loads, weights.

Chunks have two tokens on two ranks and one on four, so that segments and documents begin and end
inside of chunks and reach over several ranks.
"""

import functools
from collections.abc import Callable

import pytest

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups
from moe_parallel.systems import SELECTIONS
from tests.distributed import run_distributed
from tests.model.comparison import TOLERANCE, Start, differences, make_starts, run_each
from tests.model.small_gpt import (
    SIZES,
    Options,
    build,
    micro_batches,
)
from tests.model.test_layouts import (
    DROPPING,
    GATHERED,
    ONE,
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
EXPERTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": "moe"}

#: The systems, and what else reads the positions of tokens or all tokens of a micro-batch.
MODELS: dict[str, Options] = {name: model(name) for name in SYSTEMS} | {
    "topk, capacity": model("topk") | DROPPING | {"moe_pad_expert_input_to_capacity": True},
    "topk, own documents": model("topk") | {"reset_attention_mask": True},
    "topk, forced": model("topk") | {"moe_router_force_routing": "zipf:1.0"},
}

#: What is on together with context parallelism, by the model; the others have nothing.
BESIDE: dict[str, Options] = {
    "topk, capacity": layout(ep=2, distributed=True, overlap=True),
    "aoe": layout(ep=2) | GATHERED,
    "top_p": layout(etp=2, distributed=True),
    "expert_choice": layout(ep=2, recompute=True),
}

#: The layouts of four ranks.
FOUR: dict[str, Options] = {
    "topk, own documents": layout(tp=2, ep=2, sp=True, distributed=True) | ALL_MODULES | CP,
    "aoe, by bias": layout(pp=2, virtual=True, overlap=True, distributed=True) | CP,
    "aoe_expert_choice": layout(tp=2, ep=4, sp=True, recompute=True) | GATHERED | CP,
    "lory, uniform first segment": layout(tp=2, etp=2, sp=True) | CP,
    "segment_expert_choice": layout(tp=2, etp=2) | CP,
    "hash": layout(pp=2) | EXPERTS_AGAIN | CP,
    "aoe, free experts": layout(tp=2, ep=2, sp=True, distributed=True) | CP,
    "lory_prefix": layout(recompute=True, distributed=True) | {"context_parallel_size": 4},
}

QUICK = ("topk, capacity", "aoe", "lory")
REST = (
    "topk, sigmoid, groups, bias, shared expert",
    "topk, large router, factorized W_g, global loss",
    "topk, forced",
    "top_p",
    "expert_choice",
    "aoe_top_p",
    "topk, free experts",
    "hash",
    "smear",
    "uoe",
    "corm",
    "relu",
    "threshold",
    "aoe_threshold",
    "routing_free",
)

Begin = Callable[[tuple[str, ...]], dict[str, Start]]


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Starts of models by name, with the steps of one process from there."""

    @functools.cache
    def of(names: tuple[str, ...]) -> dict[str, Start]:
        models = {name: MODELS[name] | ONE for name in names}
        return make_starts(models, tmp_path_factory.mktemp("start"))

    return of


def _check(world: int, starts: dict[str, Start], layouts: dict[str, Options]) -> None:
    cases = {name: (starts[name], MODELS[name] | spread) for name, spread in layouts.items()}
    for name, ranks in run_each(world, cases).items():
        assert differences({name: ranks}, starts[name].on_one_rank) == {}


@pytest.mark.parametrize("names", rest_in_full([QUICK, REST], QUICK), ids=len)
def test_two_ranks_share_the_sequences(begin: Begin, names: tuple[str, ...]) -> None:
    _check(2, begin(names), {name: BESIDE.get(name, ONE) | CP for name in names})


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
def test_ranks_that_share_a_sequence_drop_the_same_experts() -> None:
    options = model("smear") | {"smear_expert_dropout": 0.5}
    (whole,) = run_distributed(1, _losses, options)
    split = layout(tp=2, etp=2, sp=True)
    for spread in (CP, split, split | CP | {"recompute_granularity": "full"}):
        world = 4 if spread.keys() > split.keys() else 2
        for losses in run_distributed(world, _losses, options | spread):
            assert losses == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.full
def test_a_capacity_counts_over_the_stretches_of_tensor_parallelism(begin: Begin) -> None:
    """Layouts with the same tp drop the same choices, whatever their cp."""
    name = "topk, capacity"
    options = MODELS[name] | {"moe_token_drop_policy": "position"}
    start = begin(QUICK)[name]
    whole, shared = (
        run_each(2 * cp, {name: (start, options | spread)})
        for cp, spread in ((1, layout(tp=2, etp=2)), (2, layout(tp=2, ep=2, sp=True) | CP))
    )
    assert all(layer["tokens_dropped"] > 0 for layer in whole[name][0].layers)
    assert differences(shared, whole[name]) == {}


def test_every_system_is_tried() -> None:
    tried = {MODELS[name]["expert_selection"] for name in (*QUICK, *REST, *FOUR)}
    assert tried == set(SELECTIONS)
