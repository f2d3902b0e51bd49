"""Layers on one process, without process groups, and what the oracle says about them."""

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import AoESelection, Selection, TopKSelection
from moe_parallel.layers import ExpertLayer, LayerContext, layer_class
from moe_parallel.ops import select_backend
from moe_parallel.parallel import Groups
from moe_parallel.selection.capacity import DROP_ORDERS, Capacity
from moe_parallel.telemetry.statistics import RoutingStatistics
from tests.oracles import layers as oracle

EXPERTS, WIDTH, EXPERT_WIDTH = 4, 5, 3
Arrays = dict[str, numpy.ndarray]


class SingleRank:
    """Stands in for a process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class Case:
    """A layer and what it is given."""

    selection: Selection
    capacity_factor: float | None = None
    policy: str = "probs"
    pad: bool = False
    #: By how much the scores of each expert are scaled (AoE) or shifted (router).
    bias: tuple[float, ...] = (0.0,) * EXPERTS
    sequences: int = 1
    tokens: int = 7

    @property
    def autonomous(self) -> bool:
        return isinstance(self.selection, AoESelection)

    @property
    def capacity(self) -> Capacity | None:
        if self.capacity_factor is None:
            return None
        k = self.selection.choices_per_token or 1
        return Capacity(self.capacity_factor, DROP_ORDERS[self.policy], self.pad, k)


def values(case: Case, seed: int = 0) -> Arrays:
    """Random weights by parameter name and the input `x` [S, B, D], all fp64."""
    rng = numpy.random.default_rng(seed)
    e, d, f = EXPERTS, WIDTH, EXPERT_WIDTH
    x = rng.normal(size=(case.tokens // case.sequences, case.sequences, d))
    if case.autonomous:
        r = case.selection.aoe_low_rank_size
        scale = numpy.exp(numpy.array(case.bias))[:, None, None]
        return {
            "x": x,
            "w_down_EDR": rng.normal(size=(e, d, r)) * scale,
            "experts.w_up_LRW": rng.normal(size=(e, r, f)),
            "experts.w_p_LDW": rng.normal(size=(e, d, f)),
            "experts.w_out_LWD": rng.normal(size=(e, f, d)),
        }
    x[..., 0] = 1.0  # so that the first column of the router shifts scores
    router = 0.3 * rng.normal(size=(e, d))
    router[:, 0] = case.bias
    return {
        "x": x,
        "w_router_ED": router,
        "experts.w_gate_up_LD2F": rng.normal(size=(e, d, 2, f)),
        "experts.w_out_LFD": rng.normal(size=(e, f, d)),
    }


def build(case: Case, weights: Arrays, dtype: torch.dtype, backend: str) -> ExpertLayer:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        add_bias_linear=False,
        bias_activation_fusion=False,
    )
    groups: Any = Groups(*[SingleRank()] * 8)  # type: ignore[list-item]
    statistics = RoutingStatistics(1, EXPERTS, torch.device("cpu"))
    context = LayerContext(groups, select_backend(backend), statistics, case.capacity, 1)
    layer = layer_class(case.selection)(config, case.selection, EXPERT_WIDTH, context)
    layer.set_layer_number(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
    return layer


def run(layer: ExpertLayer, given: Arrays, direction: numpy.ndarray) -> tuple[Any, Arrays]:
    """The output, and the gradients of sum(output * direction) plus the auxiliary losses."""
    dtype = next(layer.parameters()).dtype
    x = torch.from_numpy(given["x"]).to(dtype).requires_grad_()
    y, bias = layer(x)
    assert bias is None
    (y * torch.from_numpy(direction).to(dtype)).sum().backward()
    gradients = {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return y.detach().double().numpy(), {k: g.double().numpy() for k, g in gradients.items()}


def expected_routing(case: Case, given: Arrays) -> tuple[oracle.Routing, oracle.Routing]:
    """What the oracle routes: all choices, and those that fit."""
    x_TD = given["x"].reshape(-1, WIDTH)
    k = case.selection.moe_router_topk
    if case.autonomous:
        routing = oracle.route(oracle.norm_scores(x_TD, given["w_down_EDR"]), k)
    else:
        scores = oracle.router_scores(x_TD, given["w_router_ED"])
        routing = oracle.route(scores, k, raw_probability=k == 1)
    if case.capacity_factor is None:
        return routing, routing
    limit = oracle.capacity(len(x_TD), k, EXPERTS, case.capacity_factor)
    return routing, oracle.drop(routing, limit, case.policy)


def expected_output(case: Case, given: Arrays) -> numpy.ndarray:
    _, kept = expected_routing(case, given)
    x_TD = given["x"].reshape(-1, WIDTH)
    return oracle.combine(x_TD, kept, _experts(case, given)).reshape(given["x"].shape)


def _experts(case: Case, given: Arrays) -> list[Any]:
    if case.autonomous:
        matrices = zip(
            given["w_down_EDR"],
            given["experts.w_up_LRW"],
            given["experts.w_p_LDW"],
            given["experts.w_out_LWD"],
            strict=True,
        )
        return [lambda x, m=m: oracle.autonomous_expert(x, *m) for m in matrices]
    gate_up, out = given["experts.w_gate_up_LD2F"], given["experts.w_out_LFD"]
    return [
        lambda x, e=e: oracle.swiglu_expert(x, gate_up[e, :, 0], gate_up[e, :, 1], out[e])
        for e in range(EXPERTS)
    ]


def expected_gradients(case: Case, given: Arrays, direction: numpy.ndarray) -> Arrays:
    """By finite differences of the oracle: with respect to every weight and the input."""

    def objective(moved: Arrays) -> float:
        routing, _ = expected_routing(case, moved)
        total = float((expected_output(case, moved) * direction).sum())
        total += case.selection.moe_aux_loss_coeff * oracle.load_balancing_loss(routing)
        if isinstance(case.selection, TopKSelection):
            total += case.selection.moe_z_loss_coeff * oracle.z_loss(routing.scores)
        return total

    return oracle.numeric_gradient(objective, given)
