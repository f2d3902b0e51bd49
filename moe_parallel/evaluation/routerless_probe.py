"""Selects experts of a trained MoE without its routers: the probe of the AoE paper, section 3.1.

The routers are not used. Every expert computes every token up to a node. The K experts with the
largest norm of the activation at that node compute the token to the end. No weight is changed. The
paper tries five nodes and three norms. It does not say how the outputs of the K experts are
weighted. Here they are weighted by the softmax of their norms, as in AoE, and by 1/K each.

Shape suffixes: T tokens, E experts, D model width, F expert width, X width of a node (F or D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moe_parallel.dispatch import Dispatched
from moe_parallel.errors import InputError
from moe_parallel.experts.experts import SwiGLUExperts
from moe_parallel.layers import DispatchedLayer, FactorizedRoutedLayer, RoutedLayer
from moe_parallel.selection.choices import Choices, Rule
from moe_parallel.selection.tokens import Tokens
from moe_parallel.selection.topk import TopK


class Expert(NamedTuple):
    """The matrices of one expert, (SiLU(x W_g) * (x W_p)) W_o."""

    w_g_DF: torch.Tensor
    w_p_DF: torch.Tensor
    w_out_FD: torch.Tensor


#: From x W_g [T, F], x W_p [T, F] and W_o [F, D] of an expert to the activation at a node, [T, X].
NodeActivation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PROBE_NODES: dict[str, NodeActivation] = {
    "x W_g": lambda gate, up, w_out: gate,
    "x W_p": lambda gate, up, w_out: up,
    "SiLU(x W_g)": lambda gate, up, w_out: F.silu(gate),
    "SiLU(x W_g) * x W_p": lambda gate, up, w_out: F.silu(gate) * up,
    "output": lambda gate, up, w_out: (F.silu(gate) * up) @ w_out,
}
PROBE_NORMS = {"L1": 1.0, "L2": 2.0, "Linf": math.inf}


@dataclass(frozen=True)
class UniformProbs:
    """A rule with the choices of another rule, and equal probs that sum to 1."""

    of: Rule

    def __call__(self, scores_TE: torch.Tensor, tokens: Tokens) -> Choices:
        choices = self.of(scores_TE, tokens)
        filled_TK = (choices.experts_TK >= 0).to(choices.probs_TK)
        probs_TK = filled_TK / filled_TK.sum(dim=1, keepdim=True).clamp(min=1)
        return replace(choices, probs_TK=probs_TK)


PROBE_GATES: dict[str, Callable[[int], Rule]] = {
    "softmax": TopK,
    "uniform": lambda k: UniformProbs(TopK(k)),
}

Scores = Callable[[torch.Tensor], torch.Tensor]  # x_TD -> fp32 [T, E]


class ProbedLayer(DispatchedLayer):
    """A routed layer in which a given function scores the experts instead of the router.

    It is built from the routed layer and shares its weights, dispatcher, capacity, shared expert
    and statistics. It is for evaluation on one process, which holds every expert.
    """

    def __init__(self, routed: RoutedLayer, scores: Scores, rule: Rule) -> None:
        """
        Args:
            routed: the layer; it is not changed.
            scores: the function that scores all experts.
            rule: the function from scores to choices.
        """
        assert routed.context.groups.etp_ep.size() == 1
        self.__dict__.update(routed.__dict__)
        self.rule = self.evaluation_rule = rule
        self._scores = scores
        self._compute = routed.compute

    def choose(self, x_TD: torch.Tensor, tokens: Tokens) -> Choices:
        return self.current_rule()(self._scores(x_TD), tokens)

    def compute(self, rows: Dispatched[Any]) -> torch.Tensor:
        return self._compute(rows)


def matrices_of_experts(layer: RoutedLayer) -> list[Expert]:
    """The matrices of each expert, views of the layer's weights. The factors of W_g are
    multiplied."""
    if isinstance(layer, FactorizedRoutedLayer):
        low_rank = layer.experts
        w_g_EDF = layer.w_down_EDR @ low_rank.w_up_LRW
        matrices = zip(w_g_EDF, low_rank.w_p_LDW, low_rank.w_out_LWD, strict=True)
    else:
        swiglu = layer.experts
        assert isinstance(swiglu, SwiGLUExperts)
        w_g_LDF, w_p_LDF = swiglu.w_gate_up_LD2F.unbind(2)
        matrices = zip(w_g_LDF, w_p_LDF, swiglu.w_out_LFD, strict=True)
    return [Expert(*each) for each in matrices]


def norms_at(node: NodeActivation, order: float, experts: list[Expert]) -> Scores:
    """A function that gives the fp32 norm of each expert's activation at a node. `order` is 1, 2 or
    inf."""

    def scores(x_TD: torch.Tensor) -> torch.Tensor:
        nodes = [node(x_TD @ each.w_g_DF, x_TD @ each.w_p_DF, each.w_out_FD) for each in experts]
        norms = [torch.linalg.vector_norm(each.float(), order, dim=1) for each in nodes]
        return torch.stack(norms, dim=1)

    return scores


@dataclass(frozen=True)
class Probe:
    """A way to select experts: a row of the table."""

    selected_by: str
    norm: str
    gate: str
    replacement: Callable[[RoutedLayer], DispatchedLayer]  # of each routed layer


def probes(k: int, seed: int = 0) -> list[Probe]:
    """The three references, then five nodes x three norms x two kinds of probs.

    The references are the router, a random selection, and the router's choices with equal probs,
    which shows the loss that the probs alone cause.

    Args:
        k: experts per token.
        seed: the seed of the random selection.
    """
    by_norm = [
        Probe(
            node, norm, gate, _by_norm(PROBE_NODES[node], PROBE_NORMS[norm], PROBE_GATES[gate](k))
        )
        for node in PROBE_NODES
        for norm in PROBE_NORMS
        for gate in PROBE_GATES
    ]
    return [
        Probe("router", "", "its own", lambda routed: routed),
        Probe("random", "", "uniform", lambda routed: _at_random(routed, k, seed)),
        Probe("router", "", "uniform", _router_with_uniform_probs),
        *by_norm,
    ]


def _by_norm(
    node: NodeActivation, order: float, rule: Rule
) -> Callable[[RoutedLayer], ProbedLayer]:
    return lambda routed: ProbedLayer(
        routed, norms_at(node, order, matrices_of_experts(routed)), rule
    )


def _router_with_uniform_probs(routed: RoutedLayer) -> ProbedLayer:
    return ProbedLayer(routed, routed.logits, UniformProbs(routed.evaluation_rule))


def _at_random(routed: RoutedLayer, k: int, seed: int) -> ProbedLayer:
    generator = torch.Generator().manual_seed(seed + routed.layer_number)

    def scores(x_TD: torch.Tensor) -> torch.Tensor:
        drawn_TE = torch.rand(len(x_TD), routed.num_experts, generator=generator)
        return drawn_TE.to(x_TD.device)

    return ProbedLayer(routed, scores, UniformProbs(TopK(k)))


@contextmanager
def probing(model: Any, probe: Probe) -> Iterator[None]:
    """Inside the context, `probe` selects the experts of `model` (a torch module).

    Raises InputError if the model has no routed layers.
    """
    routed = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, RoutedLayer)
    ]
    if not routed:
        raise InputError(
            "the model has no routers to remove: probe a run of --expert-selection topk, top_p or "
            "expert_choice"
        )
    for _, _, layer in routed:
        if layer.free is not None or layer.selection.reads_token_ids:
            raise InputError(
                "the model has free experts or chooses by token id, which no probe replaces: probe "
                "a run of --expert-selection topk, top_p or expert_choice without them"
            )
    try:
        for parent, name, layer in routed:
            setattr(parent, name, probe.replacement(layer))
        yield
    finally:
        for parent, name, layer in routed:
            setattr(parent, name, layer)


@dataclass(frozen=True)
class Table:
    """The lines of a report, one at a time, because each needs an evaluation of the model.

    Each text has a column with the loss in nats per token. The column "kept" is the part of the
    router's advantage over random selection that remains on the last text. The router keeps 100%,
    random selection 0%.
    """

    router: Mapping[str, float]  # loss by text
    random: Mapping[str, float]

    def head(self) -> str:
        """The line with the names of the columns."""
        texts = "".join(f"{text:>10}" for text in self.router)
        return f"{'selected by':<20} {'norm':<5} {'probs':<8}{texts}{'kept':>8}"

    def row(self, probe: Probe, losses: Mapping[str, float]) -> str:
        """The line of a probe with these losses, by text."""
        last = list(self.router)[-1]
        advantage = self.random[last] - self.router[last]
        kept = (self.random[last] - losses[last]) / advantage if advantage else math.nan
        values = "".join(f"{losses[text]:>10.4f}" for text in self.router)
        return f"{probe.selected_by:<20} {probe.norm:<5} {probe.gate:<8}{values}{kept:>8.0%}"
