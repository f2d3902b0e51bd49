"""Whole models side by side: equal sizes and work, and the program that times them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.utils.flop_counter import FlopCounterMode

from moe_parallel.config import ParallelConfig
from moe_parallel.parallel import initialize_groups
from tests.distributed import run_distributed
from tests.tools.bench_rows import read_json
from tests.tools.running import run_tool_forked
from tools.bench import models
from tools.bench.models import main
from tools.bench.sizes import SMALL, ModelSize
from tools.bench.whole_models import (
    BENCHES,
    ModelTerms,
    number_of_weights,
    of_transformers,
)

SIZES = {
    "few experts": ModelSize(d=128, n=4, f=64, S=32, V=96),
    "many experts": ModelSize(d=128, n=16, K=4, f=32, S=32, V=96),  # Qwen3-MoE
}


def _measured(
    size: ModelSize,
) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
    """On a rank: weights, FLOPs of a forward pass, and the loss, by contender."""
    groups = initialize_groups(ParallelConfig())
    model_parallel_cuda_manual_seed(1)
    terms = ModelTerms(size, torch.float32, groups)
    benches = [build(terms) for build in BENCHES[SMALL]]
    every = [contender for bench in benches for contender in (*bench.ours, *bench.peers)]
    flops, losses = {}, {}
    for contender in every:
        with FlopCounterMode(display=False) as counter:
            (loss,) = contender.forward()
        flops[contender.name] = counter.get_total_flops()
        losses[contender.name] = loss.item()
    return {c.name: number_of_weights(c) for c in every}, flops, losses


@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
def test_models_are_as_large_and_do_the_stated_work(name: str) -> None:
    size = SIZES[name]
    ((weights, flops, losses),) = run_distributed(1, _measured, size)
    peer = next(name for name in weights if name.startswith("HF") and name.endswith("eager"))
    twins = ["ours, topk", "ours, lory", "Megatron GPTModel"]
    if name == "few experts":  # Qwen3-MoE has two norms more in a layer
        assert {weights[each] for each in twins} == {weights[peer]}
    for each, number in weights.items():  # AoE's d_wide is an integer
        assert number == pytest.approx(weights["ours, topk"], rel=0.02), each
    # torch does not count its attention on a CPU: two products of half of all pairs of tokens.
    attention = 2 * size.layers * size.B * size.S**2 * size.d
    assert flops[peer] + attention == size.products().amount
    for each, loss in losses.items():  # random weights say as much as no weights
        assert loss == pytest.approx(torch.tensor(float(size.V)).log().item(), abs=0.3), each


@pytest.mark.parametrize(
    ("device", "dtypes", "hidden"),
    [("cpu", ["float32", "bfloat16"], ""), ("cuda", ["bfloat16"], None)],
)
def test_a_gpu_is_used_only_on_request(
    device: str, dtypes: list[str], hidden: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for torch.cuda, until the processes that measure would start."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA Stand-in")
    monkeypatch.setattr("moe_parallel.ops.extension.has_cuda", lambda: True)
    seen = []
    monkeypatch.setattr(models, "_measure_all", lambda options, rows: seen.append(options))
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert models.main(["--device", device, "--sizes", "gpu"]) == 0
    (options,) = seen
    assert (options.device, options.dtype, options.sizes) == (device, dtypes, ["gpu"])
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == hidden


def test_a_model_of_transformers_takes_turns_with_its_experts() -> None:
    bench = of_transformers(ModelTerms(SIZES["few experts"], torch.float32, None))
    assert [each.name for each in bench.ours] == ["HF Mixtral moe_parallel"]
    peers = {each.name.split()[-1]: each for each in bench.peers}
    assert {"eager", "grouped_mm", "batched_mm"} < set(peers) and "moe_parallel" not in peers
    ours, *others = ((one.forward()[0].item()) for one in (*bench.ours, peers["eager"]))
    assert others == pytest.approx([ours], rel=1e-5)


@pytest.mark.full
def test_the_program(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    done = run_tool_forked("bench/models.py", "--dtype", "float32", "--turns", 1, "--json", path)
    assert (done.returncode, done.stderr) == (0, "")
    about, rows = read_json(path)
    assert [row.timed for row in rows] == ["forward", "forward+backward", "step"] * 3
    first = {each.name: each for each in rows[1].results}
    assert all(each.absent is None for each in first.values())
    assert first["ours, topk"].saved_bytes < first["HF Mixtral grouped_mm"].saved_bytes
    assert about["threads"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--sizes", "large"],
            "--sizes 'large' is unknown: choose from small, goals, gpu, transformers",
        ),
        (["--batches", "0"], "--batches is 0: it must be at least 1"),
        (["--device", "cuda"], "--device cuda: torch sees no CUDA GPU here; use --device cpu"),
    ],
)
def test_wrong_flags(
    flags: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"models.py: {message}")
