"""Layers on one process, without process groups, and the results of the oracle for them."""

from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import (
    AoESelection,
    AutonomousSelection,
    Balancing,
    Config,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
    RoutedSelection,
    Selection,
    TopKSelection,
)
from moe_parallel.layers import ExpertLayer, LayerContext
from moe_parallel.layers.forced_routing import build_forcing
from moe_parallel.ops import select_backend
from moe_parallel.parallel import Groups
from moe_parallel.selection.capacity import DROP_ORDERS, Capacity
from moe_parallel.systems import system_of
from moe_parallel.telemetry.statistics import RoutingStatistics
from tests.oracles import layers as oracle
from tests.oracles import losses, routing

EXPERTS, WIDTH, EXPERT_WIDTH = 4, 5, 3
MOE_LAYERS = 3  # the number that the model reports
Arrays = dict[str, numpy.ndarray]


class SingleRank:
    """A replacement for a process group of size one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class Case:
    """A layer, its options and its input."""

    selection: Selection
    capacity_factor: float | None = None
    policy: str = "probs"
    pad: bool = False
    counts_topk: bool = True
    #: The factor (AoE) or offset (a one-layer router) that is applied to the scores of each expert.
    bias: tuple[float, ...] = (0.0,) * EXPERTS
    sequences: int = 1
    tokens: int = 7
    training: bool = True
    #: The result of previous steps: the balancing bias, and the load of the latest step.
    balance: tuple[float, ...] | None = None
    load: tuple[float, ...] | None = None

    @property
    def autonomous(self) -> bool:
        return isinstance(self.selection, AutonomousSelection)

    @property
    def counted_k(self) -> int:
        """The K in the formula of the capacity."""
        return (self.selection.choices_per_token or 1) if self.counts_topk else 1

    @property
    def capacity(self) -> Capacity | None:
        if self.capacity_factor is None:
            return None
        return Capacity(self.capacity_factor, DROP_ORDERS[self.policy], self.pad, self.counted_k)


def values(case: Case, seed: int = 0) -> Arrays:
    """Random weights by parameter name and the input `x` [S, B, D], all fp64."""
    rng = numpy.random.default_rng(seed)
    s = case.selection
    x = rng.normal(size=(case.tokens // case.sequences, case.sequences, WIDTH))
    given = {"x": x}
    if isinstance(s, AutonomousSelection):
        given |= _low_rank_experts(rng, s.aoe_low_rank_size)
        given["w_down_EDR"] *= numpy.exp(numpy.array(case.bias))[:, None, None]
    else:
        assert isinstance(s, RoutedSelection)
        given |= _router(rng, case, x)
        if s.moe_gate_low_rank_size is not None:
            given |= _low_rank_experts(rng, s.moe_gate_low_rank_size)
        else:
            given |= {
                "experts.w_gate_up_LD2F": rng.normal(size=(EXPERTS, WIDTH, 2, EXPERT_WIDTH)),
                "experts.w_out_LFD": rng.normal(size=(EXPERTS, EXPERT_WIDTH, WIDTH)),
            }
    shared = s.moe_shared_expert_intermediate_size
    if shared is not None:
        given["shared.dense.linear_fc1.weight"] = rng.normal(size=(2 * shared, WIDTH))
        given["shared.dense.linear_fc2.weight"] = rng.normal(size=(WIDTH, shared))
        if s.moe_shared_expert_gate:
            given["shared.w_gate_1D"] = rng.normal(size=(1, WIDTH))
    return given


def _router(rng: numpy.random.Generator, case: Case, x: numpy.ndarray) -> Arrays:
    hidden = case.selection.moe_router_hidden_size
    if hidden is not None:
        return {
            "w_router_HD": 0.5 * rng.normal(size=(hidden, WIDTH)),
            "w_router_EH": 0.5 * rng.normal(size=(EXPERTS, hidden)),
        }
    x[..., 0] = 1.0  # so that the first column of the router is an offset of the scores
    router = 0.3 * rng.normal(size=(EXPERTS, WIDTH))
    router[:, 0] = case.bias
    return {"w_router_ED": router}


def _low_rank_experts(rng: numpy.random.Generator, rank: int) -> Arrays:
    return {
        "w_down_EDR": rng.normal(size=(EXPERTS, WIDTH, rank)),
        "experts.w_up_LRW": rng.normal(size=(EXPERTS, rank, EXPERT_WIDTH)),
        "experts.w_p_LDW": rng.normal(size=(EXPERTS, WIDTH, EXPERT_WIDTH)),
        "experts.w_out_LWD": rng.normal(size=(EXPERTS, EXPERT_WIDTH, WIDTH)),
    }


def build(case: Case, weights: Arrays, dtype: torch.dtype, backend: str) -> ExpertLayer:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        ffn_hidden_size=EXPERT_WIDTH,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=EXPERT_WIDTH,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
    )
    groups: Any = Groups(*[SingleRank()] * len(fields(Groups)))  # type: ignore[list-item]
    statistics = RoutingStatistics(1, EXPERTS, torch.device("cpu"))
    context = LayerContext(
        groups,
        select_backend(backend),
        statistics,
        case.capacity,
        MOE_LAYERS,
        forcing=build_forcing(Config(selection=case.selection)),
    )
    layer = system_of(case.selection).build(config, case.selection, EXPERT_WIDTH, context)
    layer.set_layer_number(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
        if case.balance is not None:
            layer.bias.bias_E.copy_(torch.tensor(case.balance))
        if case.load is not None:
            layer.load.share_E.copy_(torch.tensor(case.load))
    return layer.train(case.training)


def run(layer: ExpertLayer, given: Arrays, direction: numpy.ndarray) -> tuple[Any, Arrays]:
    """The output, and the gradients of sum(output * direction) plus the auxiliary losses."""
    dtype = next(layer.parameters()).dtype
    x = torch.from_numpy(given["x"]).to(dtype).requires_grad_()
    y, bias = layer(x)
    assert bias is None
    (y * torch.from_numpy(direction).to(dtype)).sum().backward()
    gradients = {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return y.detach().double().numpy(), {k: g.double().numpy() for k, g in gradients.items()}


def expected_scores(case: Case, given: Arrays) -> numpy.ndarray:
    x_TD = given["x"].reshape(-1, WIDTH)
    if case.autonomous:
        return oracle.norm_scores(x_TD, given["w_down_EDR"])
    if "w_router_ED" in given:
        return oracle.router_scores(x_TD, given["w_router_ED"])
    hidden = oracle.router_scores(x_TD, given["w_router_HD"])
    return oracle.router_scores(hidden, given["w_router_EH"])


def expected_choices(case: Case, scores: numpy.ndarray) -> oracle.Routing:
    """The experts that these scores select, before capacity."""
    s = case.selection
    if isinstance(s, DynamicChoices):
        if case.training:
            return routing.top_p(scores, s.moe_top_p, strict=s.moe_top_p_strict)
        p = s.moe_top_p if s.moe_inference_top_p is None else s.moe_inference_top_p
        most = s.moe_inference_max_experts
        return routing.top_p(scores, p, strict=s.moe_top_p_strict, most=most)
    if isinstance(s, ExpertsChoose):
        by_softmax = s.moe_expert_choice_scores == "softmax"
        factor = s.moe_expert_choice_capacity_factor
        if case.training:
            return routing.expert_choice(scores, factor, by_softmax=by_softmax)
        return routing.top_k(scores, round(factor), gate="all" if by_softmax else "scores")
    assert isinstance(s, FixedChoices)
    k = s.moe_router_topk
    if s.moe_router_force_routing is not None:
        assert (k, s.moe_router_force_routing) == (1, "hot:1")
        return routing.one_expert(scores)
    if s.moe_router_force_load_balancing:
        return routing.in_turn(scores, k, raw_probability=k == 1 and not case.autonomous)
    if isinstance(s, AoESelection):
        gate = "all" if s.aoe_gate == "all" else "selected"
        return routing.top_k(scores, k, gate=gate, bias=case.balance)
    assert isinstance(s, TopKSelection)
    groups = None
    if s.moe_router_num_groups is not None:
        groups = (s.moe_router_num_groups, s.moe_router_group_topk)
    return routing.top_k(
        scores,
        k,
        gate="all" if k == 1 else "selected",
        score_function=s.moe_router_score_function,
        rank_by="probabilities",
        bias=case.balance,
        groups=groups,
    )


def expected_routing(case: Case, given: Arrays) -> tuple[oracle.Routing, oracle.Routing]:
    """The routing of the oracle: all choices, and those within capacity."""
    return _routing(case, expected_scores(case, given))


def _routing(case: Case, scores: numpy.ndarray) -> tuple[oracle.Routing, oracle.Routing]:
    choices = expected_choices(case, scores)
    if case.capacity_factor is None:
        return choices, choices
    limit = oracle.capacity(len(scores), case.counted_k, EXPERTS, case.capacity_factor)
    return choices, oracle.drop(choices, limit, case.policy)


def expected_output(case: Case, given: Arrays) -> numpy.ndarray:
    return _output(case, given, expected_routing(case, given)[1])


def _output(case: Case, given: Arrays, kept: oracle.Routing) -> numpy.ndarray:
    x_TD = given["x"].reshape(-1, WIDTH)
    y_TD = oracle.combine(x_TD, kept, _experts(given))
    if case.selection.moe_shared_expert_intermediate_size is not None:
        y_TD = y_TD + numpy.array([_shared(given, x_D) for x_D in x_TD])
    return y_TD.reshape(given["x"].shape)


def _experts(given: Arrays) -> list[Any]:
    if "w_down_EDR" in given:
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


def _shared(given: Arrays, x_D: numpy.ndarray) -> numpy.ndarray:
    w_gate, w_up = numpy.split(given["shared.dense.linear_fc1.weight"], 2)
    y_D = oracle.swiglu_expert(x_D, w_gate.T, w_up.T, given["shared.dense.linear_fc2.weight"].T)
    if "shared.w_gate_1D" in given:
        y_D = routing.sigmoid(given["shared.w_gate_1D"][0] @ x_D) * y_D
    return y_D


def expected_losses(case: Case, choices: oracle.Routing) -> float:
    """The sum of the auxiliary losses, each with its coefficient."""
    s = case.selection
    total = 0.0
    if isinstance(s, Balancing):
        coefficient = s.moe_aux_loss_coeff
        if getattr(s, "moe_aux_loss_per_choice", False):
            coefficient /= MOE_LAYERS * s.moe_router_topk
        kind = s.moe_router_load_balancing_type
        if kind == "seq_aux_loss":
            total += coefficient * losses.sequence_load_balancing(choices, case.sequences)
        else:
            load = case.load if kind == "global_aux_loss" else None
            total += coefficient * losses.load_balancing(choices, load)
        total += s.moe_importance_loss_coeff * losses.importance(choices)
    if isinstance(s, RoutedSelection):
        total += s.moe_z_loss_coeff * losses.z(choices.scores)
    if isinstance(s, DynamicChoices):
        total += s.moe_entropy_loss_coeff * losses.entropy(choices)
    return total


def expected_gradients(
    case: Case, given: Arrays, direction: numpy.ndarray, fixed: numpy.ndarray | None = None
) -> Arrays:
    """Gradients with respect to every weight and the input: finite differences of the oracle.

    Args:
        fixed: bool [T, E]; where it is True, the score is a constant.
    """
    constant = expected_scores(case, given)

    def objective(moved: Arrays) -> float:
        scores = expected_scores(case, moved)
        if fixed is not None:
            scores = numpy.where(fixed, constant, scores)
        choices, kept = _routing(case, scores)
        total = float((_output(case, moved, kept) * direction).sum())
        return total + (expected_losses(case, choices) if case.training else 0.0)

    return oracle.numeric_gradient(objective, given)


def unchosen(choices: oracle.Routing) -> numpy.ndarray:
    """bool [T, E]: the experts that a token did not choose."""
    return numpy.array([[e not in row for e in range(EXPERTS)] for row in choices.experts])
