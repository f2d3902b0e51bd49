"""Every parallel layout trains the same model: equal losses, gradient norms, loads and weights.

All layouts load one checkpoint of one step on one rank and continue from its place in the data.
The reference is two more steps on one rank, computed once for each model. One world of processes
runs its layouts one after another.
"""

import functools
from collections.abc import Callable

import pytest

from tests import systems
from tests.model.comparison import (
    Runs,
    Start,
    differences,
    make_starts,
    run_all,
    run_each,
)
from tests.model.small_gpt import Options
from tests.systems import SYSTEMS
from tests.tiers import covering, rest_in_full, selected_values

#: Options of the model besides its system, for variety.
MODELS: dict[str, Options] = {
    "topk": {"moe_layer_freq": "[0]+[1]*3", "qk_layernorm": True, "kv_channels": 12},
    "topk, one expert": {
        "num_query_groups": 4,
        "moe_layer_freq": "2",
        "untie_embeddings_and_output_weights": True,
    },
    "aoe": {
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        "add_qkv_bias": True,
    },
    "aoe, probs over all": {"moe_layer_freq": "[1,0,1,0]"},
    "lory": {"moe_layer_freq": "[0]+[1]*3"},
    "routing_free": {"routing_free_threshold": 1.6},  # about half of the initial norms exceed it
}


def model(system: str) -> Options:
    return systems.options(system) | MODELS.get(system, {})


def layout(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    *,
    sp: bool = False,
    virtual: bool = False,
    distributed: bool = False,
    recompute: bool = False,
    overlap: bool = False,
) -> Options:
    """The options of a layout.

    Args:
        virtual: one layer in each virtual pipeline stage.
        overlap: communication of data parallelism during computation, in several buckets.
    """
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": sp,
        "num_layers_per_virtual_pipeline_stage": 1 if virtual else None,
        "use_distributed_optimizer": distributed,
        "recompute_granularity": "full" if recompute else None,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and distributed,
        "ddp_bucket_size": 2000 if overlap else None,
    }


ONE = layout()

#: Layouts by the number of ranks; data parallelism uses the remaining ranks.
LAYOUTS: dict[int, dict[str, Options]] = {
    1: {
        "recompute": layout(recompute=True),
        "distributed optimizer": layout(distributed=True),
    },
    2: {
        "dp2": layout(),
        "dp2, overlap": layout(overlap=True),
        "dp2, distributed optimizer": layout(distributed=True),
        "tp2": layout(tp=2, etp=2),
        "tp2, sp": layout(tp=2, etp=2, sp=True),
        "tp2, sp, etp1, recompute": layout(tp=2, sp=True, recompute=True),
        "tp2, ep2": layout(tp=2, ep=2),
        "tp2, sp, ep2": layout(tp=2, ep=2, sp=True),
        "ep2": layout(ep=2),
        "ep2, distributed optimizer, recompute, overlap": layout(
            ep=2, distributed=True, recompute=True, overlap=True
        ),
        "etp2": layout(etp=2),
        "pp2": layout(pp=2),
        "pp2, virtual, recompute": layout(pp=2, virtual=True, recompute=True),
    },
    4: {
        "dp4, distributed optimizer": layout(distributed=True),
        "ep2 in dp4, distributed optimizer, overlap": layout(ep=2, distributed=True, overlap=True),
        "ep4": layout(ep=4),
        "ep2 x etp2": layout(ep=2, etp=2),
        "ep2 x pp2": layout(pp=2, ep=2),
        "pp4": layout(pp=4),
        "pp2, virtual, dp2, overlap": layout(pp=2, virtual=True, distributed=True, overlap=True),
        "tp2 x pp2, sp, distributed optimizer": layout(
            tp=2, pp=2, etp=2, sp=True, distributed=True
        ),
        "tp2 x pp2, virtual, ep2": layout(tp=2, pp=2, ep=2, virtual=True),
        "tp2 x dp2": layout(tp=2, etp=2),
        "tp2 x dp2, sp, etp1, distributed optimizer": layout(tp=2, sp=True, distributed=True),
        "tp2 x dp2, sp, ep2": layout(tp=2, ep=2, sp=True),
        "tp2 x dp2, ep2 x etp2, distributed optimizer, overlap": layout(
            tp=2, ep=2, etp=2, sp=True, distributed=True, overlap=True
        ),
        "tp2 x dp2, ep4, recompute": layout(tp=2, ep=4, sp=True, recompute=True),
    },
}

#: The quick tier runs the layouts of one rank, and a subset in which each pair of flags occurs;
#: the two systems take turns in that subset.
_ALL = [(name, spread) for layouts in LAYOUTS.values() for name, spread in layouts.items()]
_COVERING = [_ALL[i][0] for i in covering([tuple(spread.values()) for _, spread in _ALL])]
COVERING = {"topk": {*_COVERING[::2], *LAYOUTS[1]}, "aoe": {*_COVERING[1::2], *LAYOUTS[1]}}

Starts = Callable[[str], Start]  # by system


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, asked: list[str]) -> Starts:
    """Those of the systems that the tests name are all made by one process."""

    @functools.cache
    def of_group(systems: tuple[str, ...]) -> dict[str, Start]:
        models = {system: model(system) | ONE for system in systems}
        return make_starts(models, tmp_path_factory.mktemp("start"))

    return lambda system: of_group(tuple(asked) if system in asked else (system,))[system]


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    """The systems that the tests of a file name."""
    return selected_values(request, "system", SYSTEMS)


@pytest.mark.parametrize("system", ["topk", "aoe"])
@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_agree(start: Starts, world: int, system: str) -> None:
    _check(world, start(system), model(system), set(LAYOUTS[world]) & COVERING[system])


@pytest.mark.full
@pytest.mark.parametrize("system", ["topk", "aoe"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_other_layouts_agree(start: Starts, world: int, system: str) -> None:
    _check(world, start(system), model(system), set(LAYOUTS[world]) - COVERING[system])


OTHERS = [name for name in SYSTEMS if name not in ("topk", "aoe")]
#: Variants of a system are left to the full tier.
PLAIN = [name for name in OTHERS if "," not in name]


#: A system runs in every fourth layout of two ranks, and in two of four ranks.
STEPS = {2: 4, 4: 7}

Share = Callable[[int, str], list[str]]  # the layouts of a system, by number of ranks


@pytest.fixture(scope="module")
def share(request: pytest.FixtureRequest) -> Share:
    """With `--every-layout` they are all that the system can have, those of one rank included."""
    return _possible if request.config.getoption("--every-layout") else _share


def _share(world: int, system: str) -> list[str]:
    if world == 1:
        return []
    possible = _possible(world, system)
    step = min(STEPS[world], len(possible) // 2)
    return possible[list(SYSTEMS).index(system) % step :: step]


def _possible(world: int, system: str) -> list[str]:
    return [
        name
        for name, spread in LAYOUTS[world].items()
        if not systems.merges(system) or _divides_matrices_alone(spread)
    ]


def _divides_matrices_alone(spread: Options) -> bool:
    """Whether experts are split like dense layers; merged experts cannot be split otherwise."""
    tp, etp = spread["tensor_model_parallel_size"], spread["expert_tensor_parallel_size"]
    return spread["expert_model_parallel_size"] == 1 and tp == etp


@pytest.fixture(scope="module")
def in_some_layout(start: Starts, share: Share, asked: list[str]) -> Runs:
    """Each system in the first layout of its share; the systems' shares differ."""
    cases = {
        system: (start(system), model(system) | LAYOUTS[2][share(2, system)[0]])
        for system in asked
        if system in OTHERS
    }
    return run_each(2, cases)


@pytest.mark.parametrize("system", rest_in_full(OTHERS, *PLAIN))
def test_every_system_agrees_in_some_layout(
    start: Starts, in_some_layout: Runs, system: str
) -> None:
    found = {system: in_some_layout[system]}
    assert differences(found, start(system).on_one_rank) == {}


@pytest.mark.full
@pytest.mark.parametrize("system", OTHERS)
def test_every_system_agrees_in_more_layouts(start: Starts, share: Share, system: str) -> None:
    """The other layouts of its share, and its share of those on four ranks."""
    first = share(2, system)[0]
    for world in LAYOUTS:
        if more := set(share(world, system)) - {first}:
            _check(world, start(system), model(system), more)


def _check(world: int, start: Start, options: Options, names: set[str]) -> None:
    assert names
    layouts = {name: spread for name, spread in LAYOUTS[world].items() if name in names}
    found = run_all(world, start, {name: options | spread for name, spread in layouts.items()})
    assert differences(found, start.on_one_rank) == {}


KEPT = {"aoe_recompute_scores": False, "aoe_recompute_gate": False}


@pytest.mark.parametrize("system", rest_in_full(["aoe", "aoe, by bias"], "aoe, by bias"))
def test_what_is_kept_changes_no_result(start: Starts, system: str) -> None:
    options = model(system) | KEPT
    found = run_all(1, start(system), {"one": options | ONE})
    found |= run_all(2, start(system), {"tp2, sp, ep2": options | LAYOUTS[2]["tp2, sp, ep2"]})
    assert differences(found, start(system).on_one_rank) == {}


GATHERED = {"aoe_gather_w_down": True}
GATHERING = ["aoe", "aoe, by bias", "aoe_expert_choice"]


@pytest.mark.parametrize("system", rest_in_full(GATHERING, "aoe_expert_choice"))
@pytest.mark.parametrize("world", rest_in_full([2, 4], 2))
def test_gathering_w_down_changes_no_result(start: Starts, world: int, system: str) -> None:
    """A third of the layouts that split experts; each system takes a different third. The
    checkpoint comes from one rank that holds everything."""
    thirds = _dividing(world)[GATHERING.index(system) :: 3]
    _check(world, start(system), model(system) | GATHERED, set(thirds))


def _dividing(world: int) -> list[str]:
    return [
        name
        for name, spread in LAYOUTS[world].items()
        if spread["expert_model_parallel_size"] * spread["expert_tensor_parallel_size"] > 1
    ]


#: UoE's routing neurons are on every rank, whatever divides the rest of the experts.
DIVIDING = {2: {"tp2", "tp2, sp, ep2", "ep2"}, 4: {"ep4", "ep2 x etp2"}}


@pytest.mark.parametrize("world", rest_in_full([2, 4], 2))
def test_routing_neurons_learn_from_every_rank(start: Starts, world: int) -> None:
    _check(world, start("uoe"), model("uoe"), DIVIDING[world])


def test_training_changes_what_is_compared(start: Starts) -> None:
    (run,) = start("aoe").on_one_rank
    assert run.iterations == [2, 3]
    first, last = run.losses
    assert last < first - 0.1
    assert len(set(run.grad_norms)) == 2
    assert all(0 < tokens < 64 for tokens in run.tokens)  # some are masked
    assert all(layer["max_minus_min_load"] > 0 for layer in run.layers)


# With a capacity, experts count the S * B / tp tokens that one rank routes, with and without
# sequence parallelism. So layouts with equal tp agree, and others do not.

DROPPING = {"moe_expert_capacity_factor": 0.75}

TP1 = {
    2: ["ep2", "pp2, virtual, recompute"],
    4: ["ep2 x etp2"],
}
TP2 = {
    2: ["tp2, sp, etp1, recompute", "tp2, sp, ep2"],
    4: ["tp2 x dp2, ep2 x etp2, distributed optimizer, overlap"],
}


@pytest.mark.full
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("system", ["topk", "aoe"])
def test_layouts_that_split_tokens_alike_drop_alike(
    start: Starts, system: str, policy: str
) -> None:
    _check_dropping(2, start(system), model(system) | {"moe_token_drop_policy": policy})


@pytest.mark.full
@pytest.mark.parametrize(("system", "policy"), [("topk", "probs"), ("aoe", "position")])
def test_layouts_of_four_ranks_drop_alike(start: Starts, system: str, policy: str) -> None:
    _check_dropping(4, start(system), model(system) | {"moe_token_drop_policy": policy})


def _check_dropping(world: int, start: Start, options: Options) -> None:
    options |= DROPPING
    padded = options | {"moe_pad_expert_input_to_capacity": True}
    names = TP1[world] + TP2[world]
    runs = run_all(
        world,
        start,
        # Padding changes no result, so every second layout pads.
        {name: (options, padded)[i % 2] | LAYOUTS[world][name] for i, name in enumerate(names)},
    )
    tp1 = run_all(1, start, {"one": options | ONE, "one, padded": padded | ONE})
    tp2 = run_all(2, start, {"tp2": options | LAYOUTS[2]["tp2"]})
    tp1 |= {name: runs[name] for name in TP1[world]}
    tp2 |= {name: runs[name] for name in TP2[world]}
    for of_tp in (tp1, tp2):
        expected = next(iter(of_tp.values()))
        assert all(layer["tokens_dropped"] > 0 for layer in expected[0].layers)
        assert differences(of_tp, expected) == {}
