"""FLOPs by hand, and those that torch counts in the program's own products."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from moe_parallel.config import parse_command_line
from moe_parallel.config.selection.kept import Neurons
from moe_parallel.model.flops import TokenFlops, token_flops
from moe_parallel.parallel import destroy_groups
from moe_parallel.plan.experts import PlannedExperts, PlannedRouting
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.shape import Scoring, Shape, aoe_weights, shape_of, swiglu_weights
from moe_parallel.plan.work import (
    model_flops_per_token,
    optimizer_bytes,
    planned_product,
    work_of_head,
    work_of_layer,
)
from tests.distributed import run_distributed
from tests.plan.running import (
    AOE,
    AOE_EXPERT_CHOICE,
    AOE_THRESHOLD,
    CONSTANT,
    DENSE,
    ERC,
    EXPERT_CHOICE,
    HASH,
    RELU,
    ROUTING_FREE,
    SHARED,
    TOP_P_FREE,
    UOE,
    VOCABULARY,
    Options,
    batches,
    config_of,
    engine_of,
    planned_shape,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "papers"
D, N, K, F, R, W, S, V = 64, 8, 2, 96, 16, 80, 32, 112
SHAPE = Shape((True,), D, 4, 2, 16, 128, V, False, S, bf16=True)
TOPK = replace(SHAPE, experts=PlannedExperts(N, K, F, swiglu_weights(D, N, F)))
AUTONOMOUS = replace(
    SHAPE, experts=PlannedExperts(N, K, W, aoe_weights(D, N, R, W, "none"), Scoring(R))
)
ALONE = Layout(ranks=1, micro_batch=2)
T = 2 * S


def flops(shape: Shape, layout: Layout = ALONE) -> dict[str, tuple[float, float]]:
    return {w.name: (w.flops, w.backward_flops) for w in work_of_layer(shape, layout, True)}


def test_a_routed_layer_by_hand() -> None:
    found = flops(TOPK)
    assert found["router"] == (2 * T * D * N, 4 * T * D * N)
    assert found["x [W_g | W_p]"] == (2 * T * K * D * 2 * F, 4 * T * K * D * 2 * F)
    assert found["h W_out"] == (2 * T * K * F * D, 4 * T * K * F * D)
    assert found["attention"] == (2 * T * S * D, 5 * T * S * D)


def test_aoe_adds_the_norms_of_all_experts() -> None:
    norms, up = 2 * T * N * D * R, 2 * T * K * R * W
    assert flops(AUTONOMOUS)["norms of C"] == (norms, 3 * norms)
    assert flops(AUTONOMOUS)["C W_up"] == (up, 3 * up)  # once more in the backward pass
    assert "C of the rows" not in flops(AUTONOMOUS)
    found = flops(AUTONOMOUS, replace(ALONE, ranks=2, ep=2))
    assert found["C of the rows"][0] == 2 * T * K * D * R
    assert AUTONOMOUS.experts is not None
    for scoring, backward in (
        (Scoring(R, recomputes_scores=False), 2 * norms),
        (Scoring(R, all_norms_learn=False), 2 * norms * K / N),
    ):
        shape = replace(AUTONOMOUS, experts=replace(AUTONOMOUS.experts, scoring=scoring))
        assert flops(shape)["norms of C"] == (norms, backward)


def test_routing_neurons_compute_every_token() -> None:
    neurons = 4
    shape = replace(
        SHAPE, experts=PlannedExperts(N, K, F - neurons, swiglu_weights(D, N, F), Neurons(neurons))
    )
    found, width = flops(shape), N * neurons
    assert found["routing neurons"] == (2 * T * D * 2 * width, 4 * T * D * 2 * width)
    assert found["output of routing neurons"][0] == 2 * T * width * D
    assert found["h W_out"][0] == 2 * T * K * (F - neurons) * D


def test_the_coupling_loss_costs_what_its_products_cost() -> None:
    """The paper: 2 n^2 d F a layer and pass, whatever the tokens."""
    assert TOPK.experts is not None
    shape = replace(TOPK, experts=replace(TOPK.experts, routing=PlannedRouting(coupled=True)))
    assert flops(shape)["coupling loss"][0] == 2 * N**2 * D * F
    assert flops(shape, replace(ALONE, ranks=2, ep=2))["coupling loss"][0] == N**2 * D * F
    assert model_flops_per_token(shape) == model_flops_per_token(TOPK)


def test_a_layout_divides_the_flops() -> None:
    """tp divides all but what each rank computes for its own tokens, which are fewer."""
    whole, part = flops(TOPK), flops(TOPK, replace(ALONE, ranks=2, tp=2, etp=2))
    for name, (forward, _) in whole.items():
        assert part[name][0] == forward / 2, name


def test_memory_traffic_of_a_product_by_hand() -> None:
    work = planned_product("", "", "", (10, 3, 5), 2, matrices=2)
    x, w, y = 10 * 3, 2 * 3 * 5, 10 * 5
    assert (work.nbytes, work.backward_bytes) == (2 * (x + w + y), 4 * (x + w + y) + 12 * w)


def test_memory_traffic_of_an_update_by_hand() -> None:
    """The gradient is read for its norm and set to 0. Adam reads it, and reads and writes two
    moments and an fp32 weight; in bf16 it also writes the weight."""
    assert optimizer_bytes(1, 0, SHAPE) == optimizer_bytes(1, 0, replace(SHAPE, bf16=False)) == 8
    assert optimizer_bytes(0, 1, SHAPE) == 4 + 2 * (4 + 4 + 4) + 2
    assert optimizer_bytes(0, 1, replace(SHAPE, bf16=False)) == 4 + 2 * (4 + 4 + 4)


def test_model_flops_are_three_forward_passes() -> None:
    layer = 2 * D * 128 + 2 * D * D + 2 * D * N + K * 6 * D * F + 2 * S * D
    assert model_flops_per_token(TOPK) == 3 * (layer + 2 * D * V)


def _counted() -> tuple[float, float]:
    config = config_of(DENSE | {"bf16": True, "num_layers": 1})
    engine = engine_of(config)
    (chunk,) = engine.chunks
    batch = next(batches(config))
    batch.pop("position_ids")
    with FlopCounterMode(display=False) as counter:
        chunk(batch.pop("tokens"), None, None, **batch)
    shape, layout = shape_of(config, VOCABULARY), Layout(ranks=1, micro_batch=4)
    work = work_of_layer(shape, layout, False)
    head = work_of_head(shape, layout)
    # torch does not count its CPU kernel of attention. The head computes its gradients forward.
    planned = sum(w.flops for w in work if w.name != "attention")
    planned += sum(w.flops + w.backward_flops for w in head)
    destroy_groups()
    return planned, counter.get_total_flops()


def test_the_products_of_a_dense_model() -> None:
    planned, counted = run_distributed(1, _counted)[0]
    assert planned == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("name", ["aoe/aoe_732m", "aoe/moe_732m", "dynamic/dense_374m"])
def test_a_plan_and_a_run_count_the_same_model_flops(name: str) -> None:
    config = parse_command_line(["--config", str(EXAMPLES / f"{name}.yaml")])
    vocabulary = config.padded_vocab_size(config.data.vocab_size or 0)
    choices = config.moe.num_experts and config.selection.mean_choices
    counted = token_flops(config, vocabulary, choices or 0)
    shape = shape_of(config, config.data.vocab_size or 0)
    _compare_with_run(shape, counted)


def _compare_with_run(shape: Shape, counted: TokenFlops) -> None:
    # A run counts the (S + 1) / 2 keys of a mask's mean row, a plan S / 2.
    attention = counted.attention / (shape.seq_length + 1)
    assert model_flops_per_token(shape) == pytest.approx(3 * (counted.forward - attention))


@pytest.mark.parametrize(
    "options",
    [
        SHARED,
        {"moe_router_hidden_size": 24},
        {"moe_gate_low_rank_size": 16},
        AOE | SHARED,
        EXPERT_CHOICE,
        AOE_EXPERT_CHOICE,
        AOE_THRESHOLD,
        RELU,
        ROUTING_FREE,
        UOE,
        HASH,
        CONSTANT,
        TOP_P_FREE,
        ERC,
    ],
    ids=[
        "shared",
        "large router",
        "W_g of two factors",
        "aoe",
        "expert_choice",
        "aoe, experts",
        "aoe_threshold",
        "relu",
        "routing_free",
        "uoe",
        "hash",
        "constant",
        "top_p, free",
        "coupling loss",
    ],  # fmt: skip
)
def test_a_plan_and_a_run_count_the_same_flops_of_a_system(options: Options) -> None:
    config = config_of(options)
    vocabulary = config.padded_vocab_size(VOCABULARY)
    shape = planned_shape(config)
    assert shape.experts is not None
    counted = token_flops(config, vocabulary, shape.experts.per_token)
    _compare_with_run(shape, counted)
