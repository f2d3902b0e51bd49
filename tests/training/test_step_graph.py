"""The passes of a step as a CUDA graph, with a stand-in on a CPU that repeats operators."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_parallel.config import make_config, validate
from moe_parallel.errors import InputError
from tests import systems
from tests.distributed import run_distributed
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full
from tests.training.graph_stand_in import stand_in
from tests.training.tiny_run import TINY, Layout, TinyRun

ROOT = Path(__file__).resolve().parents[2]
GRAPH = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 2}
NATIVE = {"moe_backend": "native"}
BF16 = {"bf16": True}
STEPS = 6


def _trained(options, path):
    """The loss and gradient norm of each step, the routing of all, the weights at the end."""
    run = TinyRun(Layout(), path, options=options | NATIVE)
    measured = run.steps(STEPS)
    routing = run.engine.statistics.training.summaries()
    rows = run.engine.progress.take()[1]
    weights = {name: weight.detach().clone() for name, weight in run.parameters()}
    run.close()
    return measured, routing, rows, weights


def _trained_both_ways(options, path):
    launched = _trained(options, path)
    with stand_in():
        replayed = _trained(options | GRAPH, path)
    return launched, replayed


def _is_possible(name):
    try:
        validate(make_config(TINY | systems.options(name) | GRAPH), 1)
    except InputError:
        return False
    return True


QUICK = ("aoe", "topk, one expert", "lory")


@pytest.mark.parametrize("name", rest_in_full(list(filter(_is_possible, SYSTEMS)), *QUICK))
def test_a_replayed_step_is_the_same(tmp_path, name):
    options = systems.options(name)
    ((launched, replayed),) = run_distributed(1, _trained_both_ways, options, tmp_path)
    assert replayed[:3] == launched[:3]
    assert all(torch.equal(replayed[3][name], weight) for name, weight in launched[3].items())


REFUSED = {
    "tensor_model_parallel_size": {"tensor_model_parallel_size": 2},
    "context_parallel_size": {"context_parallel_size": 2},
    "pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "expert_model_parallel_size": {"expert_model_parallel_size": 2},
    "overlap_grad_reduce": {"overlap_grad_reduce": True},
    "recompute_granularity": {"recompute_granularity": "full"},
    "attention_backend": {"attention_backend": "local"},
    "reset_attention_mask": {"reset_attention_mask": True},
    "fp8_format": {"fp8_format": "hybrid", "bf16": True, "hidden_size": 64, "ffn_hidden_size": 64},
    "expert_selection": {"expert_selection": "top_p"},
    "free experts": {"moe_zero_experts": 1},
    "moe_expert_capacity_factor": {"moe_expert_capacity_factor": 1.0},
    "moe_router_trace": {"moe_router_trace": "trace.npz"},
    "moe_erc_loss_coeff": {"moe_erc_loss_coeff": 0.1},
    "forced routing": {"moe_router_force_load_balancing": True},
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_host_does_in_each_step_is_refused(name):
    told = name if " " in name else "--" + name.replace("_", "-")
    config = make_config(TINY | REFUSED[name] | GRAPH)
    with pytest.raises(InputError, match=f"^--cuda-graph-impl full_iteration is not for {told}"):
        validate(config, 2)


def test_a_padded_capacity_and_a_dense_model_are_not_refused():
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    validate(make_config(TINY | padded | GRAPH), 1)
    dense = {name: value for name, value in TINY.items() if not name.startswith(("num_e", "moe"))}
    validate(make_config(dense | GRAPH), 1)


def _says_on_a_cpu(path):
    with pytest.raises(InputError, match="needs a GPU, and torch sees none"):
        TinyRun(Layout(), path, options=GRAPH)
    return True


def test_a_cpu_is_refused(tmp_path):
    assert run_distributed(1, _says_on_a_cpu, tmp_path) == [True]


@pytest.mark.gpu
def test_graphs_on_a_gpu_train_the_same():
    """Up to the order in which it adds. Each model makes NCCL's groups anew, so there are few."""
    models = {name: systems.options(name) for name in (*QUICK, "aoe, by bias")}
    models |= {"aoe, bf16": models["aoe"] | BF16}
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
            assert mine["experts_per_token"] == its["experts_per_token"], name
