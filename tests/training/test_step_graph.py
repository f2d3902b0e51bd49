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
from moe_parallel.training.standalone import evaluation_config, on_one_process
from tests import systems
from tests.distributed import run_distributed
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full
from tests.training.graph_stand_in import Recorded, stand_in
from tests.training.tiny_run import AOE, TINY, Layout, TinyRun

ROOT = Path(__file__).resolve().parents[2]
GRAPH = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 2}
NATIVE = {"moe_backend": "native"}
BF16 = {"bf16": True}
STEPS = 6


def _trained(options, path):
    """The loss, the gradient norm and the routing of each step, and the weights at the end.

    Between steps the statistics are cleared, as by a log line, and one evaluation runs.
    """
    run = TinyRun(Layout(), path, options=NATIVE | options)
    engine, steps = run.engine, []
    for number in range(STEPS):
        measured = run.steps(1)
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


def _trained_both_ways(options, path):
    launched = _trained(options, path)
    with stand_in():
        replayed = _trained(options | GRAPH, path)
        return launched, replayed, Recorded.replays


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
    "aoe, bf16, within a budget": AOE | BF16 | {"moe_activation_budget": 0.01},
}
TRAINED = {name: options for name, options in TRAINED.items() if _is_possible(options)}
QUICK = ("aoe", "plain topk, bf16, fused sums")


@pytest.mark.parametrize("name", rest_in_full(list(TRAINED), *QUICK))
def test_a_replayed_step_is_the_same(tmp_path, name):
    ((launched, replayed, replays),) = run_distributed(
        1, _trained_both_ways, TRAINED[name], tmp_path
    )
    assert replays == STEPS - GRAPH["cuda_graph_warmup_steps"]
    assert replayed[0] == launched[0]
    assert all(torch.equal(replayed[1][name], weight) for name, weight in launched[1].items())


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
    "moe_router_trace": {"moe_router_trace": "trace"},
    "moe_router_replay": {"moe_router_replay": "trace"},
    "moe_erc_loss_coeff": {"moe_erc_loss_coeff": 0.1},
    "moe_input_jitter_eps": {"moe_input_jitter_eps": 0.01},
    "moe_backend": {"moe_backend": "reference"},
    "forced routing": {"moe_router_force_load_balancing": True},
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_host_does_in_each_step_is_refused(name):
    told = name if " " in name else "--" + name.replace("_", "-")
    config = make_config(TINY | NATIVE | REFUSED[name] | GRAPH)
    with pytest.raises(InputError, match=f"^--cuda-graph-impl full_iteration is not for {told}"):
        validate(config, 2)


def test_what_is_not_refused():
    assert len(TRAINED) == 20
    assert {"dense", "topk, padded capacity", "smear", "hash", "uoe", "corm"} <= TRAINED.keys()


def _failures_of_recordings(path):
    """During the recording Python asks for a number, or memory ends."""
    found = []
    for error in (None, torch.OutOfMemoryError("no memory")):
        run = TinyRun(Layout(), path, options=NATIVE | GRAPH)
        run.steps(2)
        graph = run.engine._passes

        def passes(batches, passes=graph._passes, error=error):
            reported = passes(batches)
            if error is not None:
                raise error
            return float(reported[0]["sums"].sum())

        graph._passes = passes
        try:
            run.steps(1)
        except Exception as raised:
            found.append((type(raised).__name__, str(raised)))
        run.close()
    return found


def _failures_in_the_stand_in(path):
    with stand_in():
        return _failures_of_recordings(path)


def test_a_recording_that_fails_says_why(tmp_path):
    ((of_number, of_memory),) = run_distributed(1, _failures_in_the_stand_in, tmp_path)
    assert of_number[0] == "InputError" and "recorded (__float__() is not" in of_number[1]
    assert of_memory == ("OutOfMemoryError", "no memory")


def test_its_checkpoint_is_evaluated_on_any_device_in_any_layout(tmp_path):
    file = tmp_path / "config.yaml"
    options = TINY | NATIVE | GRAPH
    file.write_text(json.dumps({name.replace("_", "-"): x for name, x in options.items()}))
    with (
        mock.patch("moe_parallel.training.standalone.find_checkpoint"),
        mock.patch("moe_parallel.training.standalone.checked_file", lambda *_: file),
    ):
        evaluated = evaluation_config(["--tensor-model-parallel-size", "2"], "folder", 2)
    alone = on_one_process(make_config(options))
    validate(alone, 1)
    skipping = {"skip_train": True, "load": "folder", "tensor_model_parallel_size": 2}
    skipped = make_config(options | skipping)
    validate(skipped, 2)
    for config in (evaluated, alone, skipped):
        assert not config.training.uses_cuda_graph
    assert make_config(options).training.uses_cuda_graph


def _says_on_a_cpu(path):
    with pytest.raises(InputError, match="needs a GPU, and torch sees none"):
        TinyRun(Layout(), path, options=GRAPH)
    return True


def test_a_cpu_is_refused(tmp_path):
    assert run_distributed(1, _says_on_a_cpu, tmp_path) == [True]


@pytest.mark.gpu
def test_graphs_on_a_gpu_train_the_same():
    """Up to the order in which it adds. Each model makes NCCL's groups anew, so there are few."""
    names = ("aoe", "aoe, by bias", "topk, one expert", "lory")
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
            assert mine["experts_per_token"] == its["experts_per_token"], name
