"""The passes of a step as a CUDA graph, with a stand-in on a CPU that repeats operators."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from moe_parallel.config import make_config, validate
from moe_parallel.errors import InputError
from moe_parallel.model.forward import language_model_loss, run_micro_batches
from moe_parallel.training import step_graph
from tests import systems
from tests.distributed import run_distributed
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full
from tests.training.graph_stand_in import Recorded, stand_in
from tests.training.tiny_run import AOE, GATHERED, TINY, Layout, TinyRun

ROOT = Path(__file__).resolve().parents[2]
GRAPH = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 2}
NATIVE = {"moe_backend": "native"}
BF16 = {"bf16": True}
STEPS = 6
ALONE, EP2 = Layout(), Layout(2, ep=2)


def _trained(options, path, layout=ALONE):
    """The loss, the gradient norm and the routing of each step, and the weights at the end.

    Between steps the statistics are cleared, as by a log line, and one evaluation runs.
    """
    run = TinyRun(layout, path, options=NATIVE | options)
    engine, steps = run.engine, []
    for number in range(STEPS):
        engine.progress.begin_step(number)
        measured = run.steps(1)
        engine.progress.end_step()
        rows = engine.progress.take()[1]
        steps.append((measured, engine.statistics.training.summaries(), rows))
        engine.statistics.training.clear()
        if number == STEPS - 2:
            _evaluate(run)
    weights = {name: weight.detach().clone() for name, weight in run.parameters()}
    run.close()
    return steps, weights


def _evaluate(run):
    engine = run.engine
    for chunk in engine.chunks:
        chunk.eval()
    with engine.statistics.evaluating(), torch.no_grad():
        run_micro_batches(
            engine.chunks,
            run.batches(),
            engine.config.training,
            1,
            language_model_loss,
            forward_only=True,
        )


def _trained_both_ways(options, path, margin=step_graph.MARGIN, layout=ALONE):
    launched = _trained(options, path, layout)
    with stand_in(), mock.patch.object(step_graph, "MARGIN", margin):
        replayed = _trained(options | GRAPH, path, layout)
        return launched, replayed, Recorded.replays, Recorded.recordings


def _is_possible(options):
    try:
        validate(make_config(TINY | NATIVE | options | GRAPH), 1)
    except InputError:
        return False
    return True


DENSE = {"num_experts": None, "moe_layer_freq": "1"}
TRAINED = {name: systems.options(name) for name in SYSTEMS}
TRAINED |= {
    "dense": DENSE,
    "plain topk, bf16, fused sums": BF16 | {"gradient_accumulation_fusion": True},
    "plain topk, sharded optimizer": {"use_distributed_optimizer": True},
    "topk, padded capacity": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "topk, choices dropped": {"moe_expert_capacity_factor": 0.5},
    "aoe_expert_choice, selected gradient, choices dropped": AOE
    | {
        "expert_selection": "aoe_expert_choice",
        "aoe_gradient": "selected",
        "moe_expert_capacity_factor": 0.5,
    },
    "aoe, bf16, within a budget": AOE | BF16 | {"moe_activation_budget": 0.01},
}
TRAINED = {name: options for name, options in TRAINED.items() if _is_possible(options)}
QUICK = ("aoe", "plain topk, bf16, fused sums", "aoe, free experts")


@pytest.mark.parametrize("name", rest_in_full(list(TRAINED), *QUICK))
def test_a_replayed_step_is_the_same(tmp_path, name):
    ((launched, replayed, replays, _),) = run_distributed(
        1, _trained_both_ways, TRAINED[name], tmp_path
    )
    assert replays == STEPS - GRAPH["cuda_graph_warmup_steps"]
    assert_same(replayed, launched)


VARYING = [name for name in TRAINED if set(name.split(", ")) & {
    "top_p", "aoe_top_p", "relu", "threshold", "aoe_threshold", "routing_free", "free experts",
    "a free expert", "choices dropped",
}]  # fmt: skip


@pytest.mark.parametrize("name", rest_in_full(VARYING, "top_p, a moving p", "threshold, by sign"))
def test_a_step_without_room_for_its_rows_is_launched(tmp_path, name):
    """Each recording has fewer rows than every step needs, so each step is launched after all."""
    ((launched, replayed, replays, recordings),) = run_distributed(
        1, _trained_both_ways, TRAINED[name], tmp_path, 0.3
    )
    assert replays == recordings == STEPS - GRAPH["cuda_graph_warmup_steps"]
    assert_same(replayed, launched)


ON_TWO_RANKS = {
    name: options
    for name, options in TRAINED.items()
    if name in (*VARYING, "topk, by quantiles", "topk, padded capacity", "aoe", "aoe, by bias")
} | {"aoe, W_down gathered": GATHERED}


@pytest.mark.parametrize("margin", [step_graph.MARGIN, 0.3], ids=["replayed", "launched"])
@pytest.mark.parametrize("name", rest_in_full(ON_TWO_RANKS, "aoe", "top_p, a moving p"))
def test_messages_between_ranks_are_recorded_with_a_fixed_size(tmp_path, name, margin):
    """With room for the rows, steps are replayed. Without, all ranks launch them after all."""
    results = run_distributed(2, _trained_both_ways, ON_TWO_RANKS[name], tmp_path, margin, EP2)
    graphed = STEPS - GRAPH["cuda_graph_warmup_steps"]
    has_room = margin > 1 or name == "topk, padded capacity"
    assert len({recordings for *_, recordings in results}) == 1
    for launched, replayed, replays, recordings in results:
        assert replays == graphed
        assert recordings < graphed if has_room else recordings == graphed
        exact, padded = map(_without_bytes, (launched, replayed))
        assert sum(padded) >= sum(exact) > 0
        assert_same(replayed, launched)


def _without_bytes(trained):
    """Removes the bytes that were sent from the routing of each step, and returns them."""
    return [layer.pop("wire_bytes_per_token") for _, layers, _ in trained[0] for layer in layers]


def _recorded_again(options, path):
    """The recordings so far in each step, if the first one has room for too many rows."""
    with stand_in():
        run = TinyRun(ALONE, path, options=NATIVE | options | GRAPH)
        run.steps(GRAPH["cuda_graph_warmup_steps"])
        graph = run.engine._passes
        graph._most = [4 * most for most in graph._most]
        recordings = []
        for _ in range(10):
            run.steps(1)
            recordings.append(Recorded.recordings)
        run.close()
        return recordings


def test_room_that_is_not_needed_is_given_up(tmp_path):
    options = systems.options("top_p")
    (recordings,) = run_distributed(1, _recorded_again, options, tmp_path)
    assert recordings[:7] == [1] * 7 and recordings[-1] == 2


def assert_same(replayed, launched):
    assert replayed[0] == launched[0]
    assert all(torch.equal(replayed[1][name], weight) for name, weight in launched[1].items())


REFUSED = {
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 2},
    "moe_dispatch_parts": {"expert_model_parallel_size": 2, "moe_dispatch_parts": 2},
    "attention_backend": {"attention_backend": "local"},
    "fp8_format": {"fp8_format": "hybrid", "bf16": True, "hidden_size": 64, "ffn_hidden_size": 64},
    "moe_activation_budget": {"expert_selection": "top_p", "moe_activation_budget": 0.01},
    "smear_expert_dropout": {"expert_selection": "smear", "smear_sees_the_future": True},
    "moe_router_replay": {"moe_router_replay": "trace"},
    "forced routing": {"moe_router_force_load_balancing": True},
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_host_does_in_each_step_is_refused(name):
    told = name if " " in name else "--" + name.replace("_", "-")
    config = make_config(TINY | NATIVE | REFUSED[name] | GRAPH)
    with pytest.raises(InputError, match=f"^--cuda-graph-impl full_iteration is not for {told}"):
        validate(config, 2)


def _says_on_a_cpu(path):
    with pytest.raises(InputError, match="needs a GPU, and torch sees none"):
        TinyRun(ALONE, path, options=GRAPH)
    return True


def test_a_cpu_is_refused(tmp_path):
    assert run_distributed(1, _says_on_a_cpu, tmp_path) == [True]


@pytest.mark.gpu
def test_graphs_on_a_gpu_train_the_same():
    """Up to the order in which it adds. Each model makes NCCL's groups anew, so there are few."""
    names = ("aoe", "aoe, by bias", "topk, one expert", "lory", "top_p", "routing_free")
    models = {name: TRAINED[name] for name in names} | {"aoe, bf16": AOE | BF16}
    program = [sys.executable, "-m", "tests.training.graph_on_gpu", json.dumps(models)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for name, ways in json.loads(done.stdout.splitlines()[-1]).items():
        launched, replayed = ways["launched"], ways["replayed"]
        tolerance = 1e-2 if name.endswith("bf16") else 1e-4
        for mine, its in zip(replayed["steps"], launched["steps"], strict=True):
            assert mine == pytest.approx(its, rel=tolerance), name
        for mine, its in zip(replayed["routing"], launched["routing"], strict=True):
            counts = its["tokens_per_expert"]
            assert mine["tokens_per_expert"] == pytest.approx(counts, abs=sum(counts) / 50), name
            wanted = its["experts_per_token"]
            assert mine["experts_per_token"] == pytest.approx(wanted, rel=1e-2), name
