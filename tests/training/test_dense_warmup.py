"""Dense layers first, experts later: in one run, stopped at any moment, and in several runs."""

import json
from functools import partial

import pytest

from tests.distributed import RankError, run_distributed
from tests.program import AOE, SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.training.stopped_runs import kill_in_step

ITERATIONS, WARM_UP = 10, 4
EXPERTS = SMALL | {"train_iters": ITERATIONS, "expert_model_parallel_size": 2}
IN_ONE_RUN = {"moe_dense_warmup_percent": 35}  # 3.5 iterations, rounded up
DENSE = {
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "ffn_hidden_size": SMALL["moe_ffn_hidden_size"],
    "expert_model_parallel_size": None,
} | dict.fromkeys(AOE)
SYSTEMS = {
    "topk-fp32": {},
    "aoe-bf16-distributed": AOE | {"bf16": True, "use_distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=SYSTEMS)
def run(request, tmp_path_factory, data):
    """(options, folder): `folder` has a run with a warm-up, `warm`, and a dense run, `dense`."""
    folder = tmp_path_factory.mktemp("runs")
    options = EXPERTS | SYSTEMS[request.param] | data
    warm = options | IN_ONE_RUN | {"save": folder / "warm"}
    dense = options | DENSE | {"save": folder / "dense", "save_interval": WARM_UP}
    _train([warm, dense])
    return options, folder


def _train(runs, before=None):
    """The output of rank 0 for each run."""
    ranks = run_distributed(2, pretrain_here, runs, before)
    assert [code for ends in ranks for code, _ in ends] == [0] * len(runs) * 2
    return [printed for _, printed in ranks[0]]


def _losses(save):
    """(iteration, loss, gradient norm, learning rate, tokens) of each logged line."""
    records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    names = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_tokens")
    return [tuple(r[name] for name in names) for r in records if "lm_loss" in r]


def _assert_same(save, straight):
    assert _losses(save) == _losses(straight)
    last = f"iter_{ITERATIONS:07d}"
    assert same_bytes(stored_tensors(save / last), stored_tensors(straight / last))


@pytest.mark.full
def test_the_warm_up_is_dense_training(run, request):
    _, folder = run
    warm, dense = _losses(folder / "warm"), _losses(folder / "dense")
    assert len(warm) == ITERATIONS
    assert warm[:WARM_UP] == dense[:WARM_UP]
    for ours, theirs in zip(warm, dense, strict=True):
        assert ours[3:] == theirs[3:]  # schedule and tokens continue without a change
    assert warm[WARM_UP][1] != dense[WARM_UP][1]
    if request.node.callspec.params["run"] == "topk-fp32":  # no factorization truncates a rank
        assert warm[WARM_UP][1] == pytest.approx(dense[WARM_UP][1], rel=1e-5)
    switch = f"iter_{WARM_UP:07d}"
    ours = stored_tensors(folder / "warm" / switch)
    assert same_bytes(ours, stored_tensors(folder / "dense" / switch))
    layers = [
        [layer["layer"] for layer in json.loads(line).get("layers", [])]
        for line in (folder / "warm" / "metrics.jsonl").read_text().splitlines()
    ]
    assert layers[:WARM_UP] == [[]] * WARM_UP and layers[WARM_UP] == [1, 2]


@pytest.mark.full
def test_two_iterations_at_a_time(run, tmp_path):
    """Stopped in the warm-up, at its end, and after it; only the last checkpoint is kept."""
    options, folder = run
    options = options | IN_ONE_RUN | {"save": tmp_path, "keep_last": 1, "exit_interval": 2}
    goes_on = options | {"load": tmp_path}
    _train([options, *[goes_on] * 4])
    _assert_same(tmp_path, folder / "warm")
    assert [path.name for path in tmp_path.glob("iter_*")] == [f"iter_{ITERATIONS:07d}"]


@pytest.mark.full
def test_kill_9_before_the_experts_are_saved(run, tmp_path):
    options, folder = run
    options = options | IN_ONE_RUN | {"save": tmp_path}
    with pytest.raises(RankError):
        _train([options], partial(kill_in_step, 6))
    assert [path.name for path in tmp_path.glob("iter_*")] == [f"iter_{WARM_UP:07d}"]
    _train([options | {"load": tmp_path}])
    _assert_same(tmp_path, folder / "warm")


@pytest.mark.full
def test_across_runs(run, tmp_path):
    """From the checkpoint of the dense run, with a later stop; then the flag has no effect."""
    options, folder = run
    dense = folder / "dense" / f"iter_{WARM_UP:07d}"
    options = options | {"moe_use_upcycling": True, "save": tmp_path}
    with pytest.raises(RankError, match="upcycling takes a dense model of these sizes"):
        _train([options | {"load": dense, "moe_ffn_hidden_size": 16}])
    first, second = _train(
        [options | {"load": dense, "exit_interval": 7}, options | {"load": tmp_path}]
    )
    assert f"every expert starts as the dense layer of {dense} at iteration {WARM_UP}" in first
    assert "dense layer" not in second
    last = f"iter_{ITERATIONS:07d}"
    assert _losses(tmp_path) == _losses(folder / "warm")[WARM_UP:]
    assert same_bytes(stored_tensors(tmp_path / last), stored_tensors(folder / "warm" / last))
