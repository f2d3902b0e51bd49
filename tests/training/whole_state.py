"""The weights and Adam's state of a run as whole tensors, assembled from the parts on its ranks.

whole = assemble(run_distributed(2, body))          # body returns held(run)
whole["decoder.layers.1.mlp.w_router_ED", "exp_avg"]
"""

from typing import Any

import numpy
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_parallel.training.optimizer import optimizer_parts
from tests.training.tiny_run import TinyRun

Whole = dict[tuple[str, str], numpy.ndarray]  # (parameter, kind) -> the whole tensor


def held(run: TinyRun) -> list[tuple[str, str, Any, tuple[int, ...], int, numpy.ndarray]]:
    """This rank's parts: (parameter, kind, its shards, its shape here, start, flat values).

    Moments and shards are found with Megatron-Core's own functions, not with the tested code.
    """
    optimizer = run.engine.optimizer
    optimizers = optimizer_parts(optimizer)
    rows = []
    for name, parameter in run.parameters():
        shape = tuple(parameter.shape)
        shards = _shards(run, name, parameter)
        if name == "output_layer.weight":  # the last pipeline stage has a copy of the embedding
            name = "embedding.word_embeddings.weight"
        if name.endswith("linear_fc1.weight"):  # tensor parallelism splits gate and up separately
            shape = (2, shape[0] // 2, shape[1])
            shards = [(axis + 1, rank, size) for axis, rank, size in shards]
        rows.append((name, "weight", shards, shape, 0, _flat(parameter)))
        for part in optimizers:
            start, state = _state(part, parameter)
            for what, value in state.items():
                rows.append((name, what, shards, shape, start, _flat(value)))
    return rows


def _state(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[int, dict[str, torch.Tensor]]:
    start = 0
    if isinstance(optimizer, DistributedOptimizer):
        if parameter not in optimizer.model_param_gbuf_map:
            return 0, {}
        start = optimizer._get_model_param_range_map(parameter)["param"].start
        state = dict(optimizer._get_main_param_and_optimizer_states(parameter))
        main = state.pop("param")
    else:
        main = getattr(parameter, "main_param", parameter)
        state = dict(optimizer.optimizer.state.get(main, {}))
    if not state:
        return 0, {}
    state = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    if parameter.dtype != torch.float32:
        state["fp32_param"] = main
    return start, state


def _shards(run: TinyRun, name: str, parameter: Any) -> list[tuple[int, int, int]]:
    groups = run.groups
    is_divided = getattr(parameter, "tensor_model_parallel", False)
    if ".experts." in name or (is_divided and name.endswith(".w_down_EDR")):
        axis = parameter.partition_dim
        return [
            (0, groups.ep.rank(), groups.ep.size()),
            (axis, groups.etp.rank(), groups.etp.size()),
        ]
    if is_divided:
        return [(parameter.partition_dim, groups.tp.rank(), groups.tp.size())]
    return []


def _flat(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.detach().float().flatten().numpy().copy()


def assemble(ranks: list[Any]) -> Whole:
    """Assemble whole tensors from the parts; parts on several ranks must have equal values."""
    whole: Whole = {}
    for name, what, shards, shape, start, flat in (row for rows in ranks for row in rows):
        full, index = list(shape), [slice(0, size) for size in shape]
        for axis, rank, size in shards:
            full[axis] *= size
            index[axis] = slice(rank * shape[axis], (rank + 1) * shape[axis])
        tensor = whole.setdefault((name, what), numpy.full(full, numpy.nan, numpy.float32))
        part = tensor[tuple(index)].flatten()
        before = part[start : start + flat.size]
        assert numpy.all(numpy.isnan(before) | (before == flat)), f"{name}: copies differ"
        part[start : start + flat.size] = flat
        tensor[tuple(index)] = part.reshape(shape)
    for key, tensor in whole.items():
        assert not numpy.isnan(tensor).any(), f"{key}: no rank holds some of it"
    return whole
