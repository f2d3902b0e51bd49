"""Experts that compute in parts: the same run in every layout, and a bounded worst case."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from moe_parallel.config import make_config
from moe_parallel.layers import DispatchedLayer
from moe_parallel.ops import extension
from moe_parallel.parallel import destroy_groups
from tests.distributed import run_distributed
from tests.model.comparison import Start, differences, make_start, run_all
from tests.model.small_gpt import SIZES, Options, build
from tests.model.test_layouts import ONE, layout, model
from tests.tiers import rest_in_full
from tools.bench.measurement import BenchContender, peak_bytes, saved_bytes

BACKENDS = ["reference"] + ["native"] * extension.is_built()
SYSTEMS = ["topk", "aoe", "aoe_top_p"]
BUDGET = {"moe_activation_budget": 0.01}  # about eight rows; a rank receives at least thirty

#: The number of ranks, and their layout.
LAYOUTS: dict[str, tuple[int, Options]] = {
    "one": (1, ONE),
    "one, recompute": (1, layout(recompute=True)),
    "ep2, distributed optimizer": (2, layout(ep=2, distributed=True)),
    "tp2, etp2": (2, layout(tp=2, etp=2)),
    "tp2, ep2": (2, layout(tp=2, ep=2)),
    "pp2, virtual, recompute": (2, layout(pp=2, virtual=True, recompute=True)),
    "ep2, main gradients": (2, layout(ep=2) | {"gradient_accumulation_fusion": True}),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Start]:

    @functools.cache
    def of(system: str, backend: str) -> Start:
        options = model(system) | {"moe_backend": backend} | ONE
        return make_start(options, tmp_path_factory.mktemp("start"))

    return of


@pytest.mark.parametrize("name", rest_in_full(LAYOUTS, "tp2, ep2", "ep2, main gradients"))
@pytest.mark.parametrize("backend", rest_in_full(BACKENDS, BACKENDS[-1]))
@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, "aoe"))
def test_a_run_within_a_budget_is_the_same_run(
    start: Callable[[str, str], Start], system: str, backend: str, name: str
) -> None:
    world, spread = LAYOUTS[name]
    options = model(system) | {"moe_backend": backend}
    begun = start(system, backend)
    found = run_all(world, begun, {name: options | BUDGET | spread})
    assert differences(found, begun.on_one_rank) == {}


#: Every token of both ranks goes to the first expert, which is on the first rank.
ALL_TO_ONE = {"moe_router_topk": 1, "moe_router_force_routing": "hot:1", "moe_layer_freq": "4"}
D, WIDTH, RANK = 16, 384, 8
S, B = 128, 4
TOKENS = S * B
PARTS = 16
EP2 = layout(ep=2) | {"hidden_size": D, "ffn_hidden_size": WIDTH}
KINDS: dict[str, Options] = {
    "topk": {"moe_aux_loss_coeff": 0.0},
    "aoe": {
        "expert_selection": "aoe",
        "aoe_low_rank_size": RANK,
        "aoe_wide_size": WIDTH,
        "aoe_gate": "all",
        "moe_aux_loss_coeff": 0.0,
    },
}
ROW = {"topk": 6 * WIDTH * 4, "aoe": (6 * WIDTH + 3 * RANK) * 4}  # bytes


class Pass(NamedTuple):
    """A forward and backward pass of one layer on one rank."""

    rows: float  # received over all ranks by the first expert
    kept: int  # bytes
    peak: int
    weights: int
    values: dict[str, numpy.ndarray]


def _pass(options: Options) -> Pass:
    engine = build(make_config(SIZES | EP2 | ALL_TO_ONE | options))
    (layer,) = (each for each in engine.chunks[0].modules() if isinstance(each, DispatchedLayer))
    layer.train()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(S, B, D, generator=generator).requires_grad_()
    weights = dict(layer.named_parameters())
    contender = BenchContender(
        "layer",
        lambda: [layer(x)[0]],
        {"x": x, **weights},
        frozenset(weights),
        (torch.randn(S, B, D, generator=generator),),
    )
    kept, peak = saved_bytes(contender), peak_bytes(contender, "cpu")
    values = {name: value.numpy() for name, value in contender.values().items()}
    (summary,) = engine.statistics.training.reduced([None]).summaries()
    rows = summary["tokens_per_expert"]
    assert sum(rows) == rows[0]
    destroy_groups()
    passes = 3  # to count what is kept, for the peak, and for the values
    bytes_of_weights = sum(4 * weight.numel() for weight in weights.values())
    return Pass(rows[0] / passes, kept, peak, bytes_of_weights, values)


def _passes(options: list[Options]) -> list[Pass]:
    return [_pass(each) for each in options]


@pytest.mark.skipif(not extension.is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_at_one_expert_of_one_rank_fit(kind: str) -> None:
    rows = 2 * TOKENS
    budget = ROW[kind] * rows // PARTS
    within = {"moe_activation_budget": budget / 2**20}
    options = [KINDS[kind] | {"moe_backend": "native"} | each for each in (within, {})]
    ranks: list[Any] = run_distributed(2, _passes, options)
    for bounded, unbounded in ranks:
        assert bounded.rows == unbounded.rows == rows
        assert bounded.values.keys() == unbounded.values.keys()
        for name, expected in unbounded.values.items():
            scale = numpy.abs(expected).max(initial=1e-30)
            difference = numpy.abs(bounded.values[name] - expected).max(initial=0)
            assert difference <= 2e-6 * scale, name
    first = ranks[0][0]  # the rank of the expert
    width = 4 * D  # bytes
    numbers = 8 * 8 * (rows + TOKENS)  # a few per token and row: the row maps, scores, probs
    # In addition to the budget: tokens, what is sent and received, outputs, and their gradients.
    assert first.kept <= width * (rows + TOKENS) + numbers
    avoidable = first.peak - 4 * width * (rows + TOKENS) - 2 * first.weights - numbers
    assert avoidable <= budget
    without = ranks[0][1]
    assert without.kept > 2 * first.kept
    assert without.peak - (first.peak - avoidable) > 4 * budget


def test_a_run_at_its_worst_is_the_same_run(tmp_path: Path) -> None:
    options = model("topk, one expert") | {"moe_router_force_routing": "hot:1"}
    start = make_start(options | ONE, tmp_path)
    cases = {"ep2": options | BUDGET | layout(ep=2)}
    assert differences(run_all(2, start, cases), start.on_one_rank) == {}
