"""Layers that route segments, on one process or split over tensor-parallel ranks."""

from typing import Any

import numpy
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import Selection
from moe_parallel.layers import ExpertLayer, LayerContext
from moe_parallel.layers.system import system_of
from moe_parallel.ops import select_backend
from moe_parallel.parallel import Groups, groups_of_one
from moe_parallel.telemetry.statistics import RoutingStatistics
from tests.oracles.layers import numeric_slopes

EXPERTS, WIDTH, EXPERT_WIDTH = 4, 6, 4
Arrays = dict[str, numpy.ndarray]


def values(tokens: int, sequences: int, experts: int = EXPERTS, seed: int = 0) -> Arrays:
    """Random weights by parameter name and the input `x` [S, B, D], all fp64."""
    rng = numpy.random.default_rng(seed)
    e, d, f = experts, WIDTH, EXPERT_WIDTH
    return {
        "x": rng.normal(size=(tokens, sequences, d)),
        "w_router_ED": rng.normal(size=(e, d)),
        "experts.w_gate_up_LD2F": rng.normal(size=(e, d, 2, f)),
        "experts.w_out_LFD": rng.normal(size=(e, f, d)),
    }


def build(
    selection: Selection,
    weights: Arrays,
    dtype: torch.dtype = torch.float64,
    groups: Groups | None = None,
    sequence_parallel: bool = False,
) -> ExpertLayer:
    """A layer with this rank's part of the weights."""
    groups = groups or groups_of_one()
    experts = len(weights["w_router_ED"])
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_moe_experts=experts,
        moe_ffn_hidden_size=EXPERT_WIDTH,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        add_bias_linear=False,
        bias_activation_fusion=False,
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=sequence_parallel,
    )
    statistics = RoutingStatistics(1, experts, torch.device("cpu"))
    context = LayerContext(groups, select_backend("reference"), statistics, None, 1)
    layer = system_of(selection).build(config, selection, EXPERT_WIDTH, context)
    layer.set_layer_number(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.from_numpy(part(name, weights[name], groups)))
    return layer


def part(name: str, whole: numpy.ndarray, groups: Groups) -> numpy.ndarray:
    """The part of a weight that a rank holds."""
    axis = {"experts.w_gate_up_LD2F": 3, "experts.w_out_LFD": 1}.get(name)
    if axis is None:
        return whole
    return numpy.split(whole, groups.etp.size(), axis)[groups.etp.rank()]


def direction(x: numpy.ndarray) -> numpy.ndarray:
    """The weights of the outputs in the scalar that is differentiated."""
    return numpy.random.default_rng(1).normal(size=x.shape)


def expected_slopes(output: Any, given: Arrays) -> Arrays:
    """What `slopes` gives of the gradients of `output`, a function of such arrays."""
    weights = direction(given["x"])
    return numeric_slopes(lambda moved: float((output(moved) * weights).sum()), given)


def pairs_seen(layer: ExpertLayer, x: numpy.ndarray) -> set[tuple[int, int, int, int]]:
    """(token, its sequence, output, its sequence) for each token that changes the output."""
    found = set()
    with torch.no_grad():
        before, _ = layer(torch.from_numpy(x))
        for s, b in numpy.ndindex(x.shape[:2]):
            moved = x.copy()
            moved[s, b] += numpy.arange(x.shape[2])  # a constant might be normalized away
            after, _ = layer(torch.from_numpy(moved))
            changed = ((after - before) != 0).any(2).nonzero().tolist()
            found |= {(s, b, *place) for place in changed}
    return found
