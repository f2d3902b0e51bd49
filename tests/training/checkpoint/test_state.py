"""The state of a run besides its weights: buffers of options, and FP8's scales."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from moe_parallel.errors import InputError
from tests.distributed import run_distributed
from tests.experts import fp8_stand_in
from tests.program import SMALL, pretrain_here, small_data
from tests.tiers import rest_in_full
from tests.training.tiny_run import AOE, Layout, TinyRun

ONE_STEP = {"train_iters": 4, "exit_interval": 1}
BIAS = {"moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0}
TOP_P: dict[str, Any] = {"expert_selection": "top_p"}

#: The options of a run, those with which it continues, the option, and both values.
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    (BIAS, {"moe_router_bias_update": "id"}, "--moe-router-bias-update", "sign", "id"),
    (
        BIAS | {"moe_router_bias_update": "id"},
        {"moe_router_bias_update": "quantile"},
        "--moe-router-bias-update",
        "id",
        "quantile",
    ),
    (
        {"expert_selection": "threshold"},
        {"moe_threshold_update": "sign"},
        "--moe-threshold-update",
        "quantile",
        "sign",
    ),
    (TOP_P, {"moe_top_p_target_experts": 2}, "--moe-top-p-target-experts", "None", "2.0"),
]


def continued_here(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    messages = []
    for first, changes in cases:
        assert [code for code, _ in pretrain_here([first])] == [0]
        with pytest.raises(InputError) as caught:
            pretrain_here([first | changes | {"load": first["save"]}])
        messages.append(str(caught.value))
    return messages


@pytest.mark.full
def test_the_option_is_named(tmp_path: Path) -> None:
    options = SMALL | small_data(tmp_path) | ONE_STEP
    cases = [
        (options | first | {"save": tmp_path / str(number)}, changes)
        for number, (first, changes, *_) in enumerate(OTHERS)
    ]
    (messages,) = run_distributed(1, continued_here, cases)
    for number, (*_, name, before, now) in enumerate(OTHERS):
        message = messages[number]
        checkpoint = tmp_path / str(number) / "iter_0000001"
        start = f"--load {checkpoint}: {name} is {before} in the checkpoint and {now} here, which "
        assert message.startswith(start), message
        assert message.endswith("; use the values of its config.yaml, or load another checkpoint")
        assert "\n" not in message


BF16 = {"bf16": True}
DELAYED = {
    "bf16": True,
    "fp8_format": "hybrid",
    "fp8_amax_history_len": 4,
    "fp8_amax_compute_algo": "max",
}
TENSORWISE = {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "tensorwise"}
AOE_16 = {**AOE, "aoe_low_rank_size": 16, "aoe_wide_size": 64}
RUNS = {
    "delayed": (Layout(), DELAYED),
    "delayed-aoe-ep2": (Layout(2, ep=2), DELAYED | AOE_16),
    "delayed-pp2": (Layout(2, pp=2), DELAYED),
    "delayed-pp2-vpp2": (
        Layout(2, pp=2, vpp=2),
        DELAYED | {"fp8_amax_compute_algo": "most_recent"},
    ),
    "delayed-dp2-distributed": (Layout(2, distributed=True), DELAYED),
    "tensorwise-etp2": (Layout(2, etp=2), TENSORWISE | {"moe_ffn_hidden_size": 64}),
}


def _run(layout, path, options):
    sys.modules.update(fp8_stand_in.stand_in_modules())
    fp8_stand_in.forget()
    return TinyRun(layout, path, options=options)


def _weights(run):
    return {name: parameter.detach().float().clone() for name, parameter in run.parameters()}


def _same(these, those):
    return these.keys() == those.keys() and all(torch.equal(these[n], those[n]) for n in these)


def _straight_and_resumed(layout, path, options):
    run = _run(layout, path, options)
    run.steps(2)
    run.save()
    straight, weights = run.steps(2), _weights(run)
    run.close()
    run = _run(layout, path, options | {"seed": 99})
    run.load(path)
    assert run.steps(2) == straight
    assert _same(_weights(run), weights)


@pytest.mark.parametrize("name", rest_in_full(RUNS, "delayed-aoe-ep2"))
def test_a_run_goes_on_bit_for_bit(tmp_path, name):
    layout, options = RUNS[name]
    run_distributed(layout.world, _straight_and_resumed, layout, tmp_path, options)


def _saved_in_one_loaded_in_the_other(path, first, second):
    run = _run(Layout(), path, first)
    run.steps(2)
    run.save()
    weights = _weights(run)
    run.close()
    run = _run(Layout(), path, second | {"seed": 99})
    run.load(path)
    assert _same(_weights(run), weights)
    assert all(loss > 0 for loss, _ in run.steps(1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"), [(BF16, DELAYED), (DELAYED, BF16), (DELAYED, TENSORWISE)]
)
def test_a_checkpoint_moves_between_precisions(tmp_path, first, second):
    run_distributed(1, _saved_in_one_loaded_in_the_other, tmp_path, first, second)


def _scales(path):
    run = _run(Layout(2), path, DELAYED)
    run.steps(2)
    (chunk,) = run.engine.chunks
    state = chunk.module.module.fp8.state()
    gathered = [None, None]
    dist.all_gather_object(gathered, state)
    assert _same(*gathered)
    assert any((scale != 1).any() for name, scale in state.items() if name.endswith("scale"))


def test_ranks_that_hold_the_same_experts_round_alike(tmp_path):
    run_distributed(2, _scales, tmp_path)


def _with_and_without_recomputation(path):
    measured = []
    for granularity in (None, "full"):
        run = _run(Layout(), path, TENSORWISE | {"recompute_granularity": granularity})
        measured.append(run.steps(2))
        run.close()
    assert measured[0] == measured[1]


def test_a_recomputed_layer_is_in_fp8_too(tmp_path):
    run_distributed(1, _with_and_without_recomputation, tmp_path)
