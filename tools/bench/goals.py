"""The project's goals for operators and layers, each for one row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tools.bench.contender import BACKWARD, BOTH, FORWARD
from tools.bench.goal import BEST, SAVED, SHARE, SPEED, Goal
from tools.bench.peers.huggingface import model_of
from tools.bench.peers.torch_ops import GROUPED_MM
from tools.bench.peers.transformer_engine import GROUPED_LINEAR, PERMUTE, UNPERMUTE
from tools.bench.rows import layers
from tools.bench.sizes import GOALS, BenchSize, sizes_of


def goals_of(device: str) -> list[Goal]:
    """The goals on "cpu" or "cuda"."""
    if device == "cuda":
        return [replace(goal, dtype="bfloat16") for goal in _gpu_goals()]
    dtypes = ("float32", "bfloat16")
    return [replace(goal, dtype=dtype) for dtype in dtypes for goal in _cpu_goals(dtype)]


def _cpu_goals(dtype: str) -> list[Goal]:
    sizes = sizes_of(GOALS, "cpu")
    moved = str(sizes["permute"][0])
    goals = [
        Goal(op, timed, moved, "", SHARE, share)
        for op, share in (("permute", 0.90), ("unpermute", 0.80))
        for timed in (FORWARD, BACKWARD)
    ]
    for size, share in zip(sizes["routed_layer"], (0.85, 0.70), strict=True):
        plain = Goal("routed_layer", BOTH, str(size), "", SPEED, 1.00, BEST)
        goals += [plain, replace(plain, bound=1.15, other=_hf_grouped_mm(size))]
        if dtype == "bfloat16":
            goals.append(replace(plain, figure=SHARE, bound=share, other=""))
    return goals + _autonomous_goals(sizes["aoe_layer"], dtype)


def _autonomous_goals(sizes: Iterable[BenchSize], dtype: str) -> list[Goal]:
    """The goals for the speed and memory of the AoE layer: against the dense products of its own
    shapes, and against the routed layer of as many parameters."""
    full = {64: 0.97, 128: 0.955, 256: 0.92, 512: 0.85}
    selected = {64: 0.99, 128: 0.98, 256: 0.97, 512: 0.94}
    share = {"float32": 0.96, "bfloat16": 0.85}[dtype]
    goals = []
    for size in sizes:
        plain = Goal("aoe_layer", BOTH, str(size), "", SPEED, 0.0, layers.TWIN)
        for name in layers.AUTONOMOUS:
            speed = (selected if name == layers.SELECTED else full)[size.l]
            goals.append(replace(plain, contender=name, bound=speed))
            goals.append(replace(plain, contender=name, figure=SHARE, bound=share, other=""))
            if size.l == 256:
                goals.append(replace(plain, contender=name, figure=SAVED, bound=0.75))
    return goals


def _gpu_goals() -> list[Goal]:
    sizes = sizes_of(GOALS, "cuda")
    moved = str(sizes["permute"][0])
    goals = []
    for op, peer in (("permute", PERMUTE), ("unpermute", UNPERMUTE)):
        for timed in (FORWARD, BACKWARD):
            goals.append(Goal(op, timed, moved, "", SHARE, 0.80))
            goals.append(Goal(op, timed, moved, "", SPEED, 1.00, peer))
    for size, share in zip(sizes["grouped_gemm"], (0.90, 0.75), strict=True):
        for timed in (FORWARD, BACKWARD):
            goals.append(Goal("grouped_gemm", timed, str(size), "", SHARE, share))
            for peer in (GROUPED_MM, GROUPED_LINEAR):
                goals.append(Goal("grouped_gemm", timed, str(size), "", SPEED, 1.00, peer))
    for size in sizes["norm_topk"]:
        goals.append(Goal("norm_topk", FORWARD, str(size), "", SHARE, 1 / 1.10))
    return goals


def _hf_grouped_mm(size: BenchSize) -> str:
    return f"{model_of(size.n)} grouped_mm"
