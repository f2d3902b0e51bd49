"""Layers on one process, without process groups, with random weights and inputs."""

from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import AutonomousSelection, Config, MoEConfig, RoutedSelection, Selection
from moe_parallel.layers import ExpertLayer, LayerContext
from moe_parallel.layers.given_choices import build_forcing
from moe_parallel.layers.system import system_of
from moe_parallel.ops import select_backend
from moe_parallel.parallel import Groups
from moe_parallel.selection.capacity import DROP_ORDERS, Capacity
from moe_parallel.systems import RoutingFreeSelection, UoESelection
from moe_parallel.systems.corm import CoRMSelection
from moe_parallel.systems.hash.rule import build_hash_table
from moe_parallel.telemetry.statistics import RoutingStatistics

EXPERTS, WIDTH, EXPERT_WIDTH = 4, 5, 3
MOE_LAYERS = 3  # the number that the model reports
#: How often each token id occurs in the text, where ids choose the experts.
TOKEN_COUNTS = [5, 1, 0, 7, 2, 2]
INIT_STD = 0.35  # the unit of the scores of AoE's free experts follows from it
Arrays = dict[str, numpy.ndarray]


class SingleRank:
    """A group of size one, as in a run: with `groups_of_one` layers draw from another generator."""

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
    #: CoRM's running mean of the tokens.
    reference: tuple[float, ...] = (0.0,) * WIDTH
    #: The number that the controller sets.
    setting: float | None = None

    @property
    def autonomous(self) -> bool:
        return isinstance(self.selection, AutonomousSelection | UoESelection)

    @property
    def free(self) -> int:
        return getattr(self.selection, "free_experts", 0)

    @property
    def counted_k(self) -> int:
        """The K in the formula of the capacity."""
        return (self.selection.choices_per_token or 1) if self.counts_topk else 1

    @property
    def capacity(self) -> Capacity | None:
        if self.capacity_factor is None:
            return None
        order = DROP_ORDERS[self.policy]
        tau = getattr(self.selection, "moe_free_expert_tau", 1.0)
        return Capacity(self.capacity_factor, order, self.pad, self.counted_k, self.free, tau)


def values(case: Case, seed: int = 0) -> Arrays:
    """Random weights by parameter name and the input `x` [S, B, D], all fp64."""
    rng = numpy.random.default_rng(seed)
    s = case.selection
    x = rng.normal(size=(case.tokens // case.sequences, case.sequences, WIDTH))
    given = {"x": x}
    if isinstance(s, AutonomousSelection):
        given |= _low_rank_experts(rng, s.aoe_low_rank_size)
        given["w_down_EDR"] *= numpy.exp(numpy.array(case.bias))[:, None, None]
        if case.free:
            given["w_free_Z"] = rng.normal(1.0, 0.2, size=case.free)
        if isinstance(s, RoutingFreeSelection):
            given["b_E"] = 0.3 * rng.normal(size=EXPERTS)
    elif isinstance(s, UoESelection):
        given |= _union(rng, s.routing_neurons(EXPERT_WIDTH, EXPERTS))
        given["w_gate_up_ED2R"] *= numpy.exp(numpy.array(case.bias))[:, None, None, None]
    elif isinstance(s, CoRMSelection):
        given["w_key_RD"] = rng.normal(size=(s.corm_key_size, WIDTH))
        given["w_query_ERD"] = rng.normal(size=(EXPERTS, s.corm_key_size, WIDTH))
        given |= _swiglu_experts(rng, EXPERT_WIDTH)
    else:
        assert isinstance(s, RoutedSelection)
        given |= _router(rng, case, x)
        if s.moe_gate_low_rank_size is not None:
            given |= _low_rank_experts(rng, s.moe_gate_low_rank_size)
        else:
            given |= _swiglu_experts(rng, EXPERT_WIDTH)
    constants = getattr(s, "moe_constant_experts", 0)
    if constants:
        given["w_constant_CAD"] = rng.normal(size=(constants, 2, WIDTH))
        given["v_CD"] = rng.normal(size=(constants, WIDTH))
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
            "w_router_EH": 0.5 * rng.normal(size=(EXPERTS + case.free, hidden)),
        }
    x[..., 0] = 1.0  # so that the first column of the router is an offset of the scores
    router = 0.3 * rng.normal(size=(EXPERTS + case.free, WIDTH))
    router[:, 0] = (*case.bias, *[0.0] * case.free)
    return {"w_router_ED": router}


def _swiglu_experts(rng: numpy.random.Generator, width: int) -> Arrays:
    return {
        "experts.w_gate_up_LD2F": rng.normal(size=(EXPERTS, WIDTH, 2, width)),
        "experts.w_out_LFD": rng.normal(size=(EXPERTS, width, WIDTH)),
    }


def _union(rng: numpy.random.Generator, neurons: int) -> Arrays:
    return {
        "w_gate_up_ED2R": rng.normal(size=(EXPERTS, WIDTH, 2, neurons)),
        "w_out_ERD": rng.normal(size=(EXPERTS, neurons, WIDTH)),
    } | _swiglu_experts(rng, EXPERT_WIDTH - neurons)


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
        init_method_std=INIT_STD,
        moe_ffn_hidden_size=EXPERT_WIDTH,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
    )
    statistics = RoutingStatistics(1, EXPERTS, torch.device("cpu"))
    context = LayerContext(
        Groups(*[SingleRank()] * len(fields(Groups))),  # type: ignore[list-item]
        select_backend(backend),
        statistics,
        case.capacity,
        MOE_LAYERS,
        forcing=build_forcing(Config(selection=case.selection)),
        hash_table_VK=build_hash_table(
            Config(moe=MoEConfig(num_experts=EXPERTS), selection=case.selection),
            len(TOKEN_COUNTS),
            TOKEN_COUNTS,
        ),
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
        if isinstance(case.selection, CoRMSelection):
            layer.reference.mean_D.copy_(torch.tensor(case.reference))
        if case.setting is not None:
            layer.controller.state[0] = case.setting
    return layer.train(case.training)


def token_ids(x: numpy.ndarray) -> list[int]:
    """The id of each token, in the order of the layer."""
    return [(5 * token + 1) % len(TOKEN_COUNTS) for token in range(x.shape[0] * x.shape[1])]


def run(layer: ExpertLayer, given: Arrays, direction: numpy.ndarray) -> tuple[Any, Arrays]:
    """The output, and the gradients of sum(output * direction) plus the auxiliary losses."""
    dtype = next(layer.parameters()).dtype
    x = torch.from_numpy(given["x"]).to(dtype).requires_grad_()
    layer.token_ids_BS = torch.tensor(token_ids(given["x"])).view(x.shape[:2]).t()
    y, bias = layer(x)
    assert bias is None
    (y * torch.from_numpy(direction).to(dtype)).sum().backward()
    gradients = {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return y.detach().double().numpy(), {k: g.double().numpy() for k, g in gradients.items()}
