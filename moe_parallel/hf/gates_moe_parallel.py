"""The gates, which select experts by scores, and their rules.

Shape suffixes: T tokens, E experts, K slots per token, D model width, R low-rank size (d_low) or
routing neurons of an expert, H router width, G groups of experts, M experts of a group, Z free
experts, V token ids. In scores, E includes the free experts, which come last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_moe_parallel import MoeParallelConfig

#: From the scores of the chosen experts to weights that sum to 1 over them.
NORMALIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda scores_TK: scores_TK.softmax(dim=-1),
    # In logarithms, because every sigmoid rounds to 0 if all scores are far below 0.
    "sigmoid": lambda scores_TK: F.logsigmoid(scores_TK).softmax(dim=-1),
}
#: From the scores of all experts to weights that do not depend on the choice.
WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda scores_TE: scores_TE.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "raw": lambda scores_TE: scores_TE,
}

#: The same for a rule that adds a bias to the scores (then called values) and compares them with a
#: threshold: from scores, values and whether an expert is chosen, all [T, E].
OF_VALUES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "softmax": lambda scores, values, chosen: scores.softmax(dim=-1),
    "sigmoid": lambda scores, values, chosen: torch.sigmoid(scores),
    "sigmoid_of_value": lambda scores, values, chosen: torch.sigmoid(values),
    "raw_value": lambda scores, values, chosen: values,
    "softmax_of_chosen": lambda scores, values, chosen: values.masked_fill(
        ~chosen, torch.finfo(values.dtype).min
    ).softmax(dim=-1),
}

Chosen = tuple[torch.Tensor, torch.Tensor]  # weights (fp32) and experts, both [T, K]


def greatest(values: torch.Tensor, k: int, ties: torch.Tensor | None = None) -> torch.Tensor:
    """The K largest of each row; of equal values the one with the larger `ties`, then the first."""
    if ties is not None:
        order = ties.sort(dim=-1, descending=True, stable=True).indices
        return order.gather(1, greatest(values.gather(1, order), k))
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


class TopK:
    """The experts with the K highest scores, perhaps after a bias, perhaps of the best groups."""

    def __init__(self, config: MoeParallelConfig) -> None:
        self.k, self.groups, self.chosen_groups = (
            config.num_experts_per_tok, config.n_group, config.topk_group
        )  # fmt: skip
        self.weight = WHOLE[config.scoring_func]
        self.normalized = NORMALIZED[config.scoring_func] if config.norm_topk_prob else None
        self.by_probability = config.scores == "router"

    def __call__(self, scores_TE: torch.Tensor, bias_E: torch.Tensor | None) -> Chosen:
        if bias_E is None and self.groups is None:
            return self.of(scores_TE, greatest(scores_TE, self.k))
        ranked_TE, ties_TE = scores_TE, None
        if self.by_probability:  # which may saturate
            ranked_TE, ties_TE = self.weight(scores_TE), scores_TE
        if bias_E is not None:
            ranked_TE = ranked_TE + bias_E
        if self.groups is not None:
            ranked_TE = self._of_best_groups(ranked_TE, scores_TE)
        return self.of(scores_TE, greatest(ranked_TE, self.k, ties_TE))

    def of(self, scores_TE: torch.Tensor, index_TK: torch.Tensor) -> Chosen:
        """The weights of given experts."""
        if self.normalized is not None:
            return self.normalized(scores_TE.gather(1, index_TK)), index_TK
        return self.weight(scores_TE).gather(1, index_TK), index_TK

    def _of_best_groups(self, ranked_TE: torch.Tensor, scores_TE: torch.Tensor) -> torch.Tensor:
        """-inf for experts of other groups. A group counts by its best K / topk_group experts."""
        assert self.groups is not None and self.chosen_groups is not None
        ranked_TGM, scores_TGM = (x.unflatten(1, (self.groups, -1)) for x in (ranked_TE, scores_TE))
        value_TG, score_TG = (
            x.topk(max(1, self.k // self.chosen_groups), dim=2).values.sum(dim=2)
            for x in (ranked_TGM, scores_TGM)
        )
        groups = greatest(value_TG, self.chosen_groups, score_TG)
        others_TG = torch.ones_like(value_TG, dtype=torch.bool).scatter(1, groups, False)
        return ranked_TGM.masked_fill(others_TG[..., None], -torch.inf).flatten(1)


class TopP:
    """The most probable experts until their probabilities reach p; other slots have weight 0."""

    ROUNDING = 1e-6  # fp32 probabilities sum to 1 only within it

    def __init__(self, config: MoeParallelConfig) -> None:
        self.p, self.cap = config.moe_top_p, config.num_experts_per_tok
        self.inclusive = config.moe_top_p_strict or config.moe_top_p == 1
        self.renormalizes = config.norm_topk_prob

    def __call__(self, scores_TE: torch.Tensor, bias_E: torch.Tensor | None) -> Chosen:
        index_TK = greatest(scores_TE, scores_TE.shape[-1])
        weights_TK = scores_TE.softmax(dim=-1).gather(1, index_TK)
        before_TK = weights_TK.double().cumsum(dim=-1) - weights_TK.double()
        if self.inclusive:
            needed_TK = before_TK <= self.p + self.ROUNDING
        else:
            needed_TK = before_TK < self.p - self.ROUNDING
        needed_TK = needed_TK | (before_TK == 0)  # at least one
        weights_TK = (weights_TK * needed_TK)[:, : self.cap]
        if self.renormalizes:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK, index_TK[:, : self.cap]


class Threshold:
    """The experts whose value, score plus bias, is above the threshold.

    Each expert has a slot; those that are not chosen have weight 0.
    """

    def __init__(self, config: MoeParallelConfig) -> None:
        self.threshold, self.weight = config.threshold, OF_VALUES[config.scoring_func]

    def __call__(self, scores_TE: torch.Tensor, bias_E: torch.Tensor | None) -> Chosen:
        assert bias_E is not None
        values_TE = scores_TE + bias_E
        chosen_TE = values_TE > self.threshold
        weights_TE = self.weight(scores_TE, values_TE, chosen_TE)
        index_E = torch.arange(scores_TE.shape[-1], device=scores_TE.device)
        return weights_TE * chosen_TE, index_E.expand_as(scores_TE)


class ReLU:
    """Every expert with a positive score, which is its weight; other slots have weight 0."""

    def __init__(self, config: MoeParallelConfig) -> None:
        self.slots = config.num_experts_per_tok

    def __call__(self, scores_TE: torch.Tensor, bias_E: torch.Tensor | None) -> Chosen:
        index_TK = greatest(scores_TE, self.slots)
        return F.relu(scores_TE).gather(1, index_TK), index_TK


RULES: dict[str, Callable[[MoeParallelConfig], Any]] = {
    "topk": TopK,
    "top_p": TopP,
    "relu": ReLU,
    "threshold": Threshold,
    "hash": TopK,  # of what a table has chosen
}


class Selected(NamedTuple):
    """The choice for T tokens, and what a gate computed for it that others use too."""

    scores_TE: torch.Tensor  # fp32
    weights_TK: torch.Tensor  # fp32
    index_TK: torch.Tensor
    c_TER: torch.Tensor | None = None  # x W_down, for low-rank experts
    output_TD: torch.Tensor | None = None  # of routing neurons; it is added to the experts'


class MoeParallelGate(nn.Module):
    """Selects experts by scores. vLLM leaves it alone, because no parameter is named `weight`."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        self.choose = RULES[config.rule](config)
        self.num_experts = config.num_experts
        self.expert_bias = None  # no buffer, because vLLM loads parameters only
        if config.expert_bias:
            bias_E = torch.zeros(config.num_experts + config.free_experts, dtype=torch.float32)
            self.expert_bias = nn.Parameter(bias_E, requires_grad=False)
        self.expert_table = None
        if config.rule == "hash":
            shape = config.vocab_size, config.num_experts_per_tok
            table_VK = torch.zeros(shape, dtype=torch.int64)
            self.expert_table = nn.Parameter(table_VK, requires_grad=False)
        self.computes_c = config.low_rank_size is not None and not config.folded
        self.w_down = None
        if self.computes_c or config.scores == "norms":
            assert config.low_rank_size is not None
            rows = config.num_experts * config.low_rank_size
            self.w_down = nn.Parameter(torch.empty(rows, config.hidden_size))

    def forward(
        self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> Selected:
        """From [T, D], and ids [T] if a table chooses by them."""
        c_TER = None
        if self.w_down is not None:
            c_TER = F.linear(hidden_states, self.w_down).unflatten(-1, (self.num_experts, -1))
        scores_TE = self.scores(hidden_states, c_TER)
        chosen = self.choice(scores_TE, token_ids)
        return Selected(scores_TE, *chosen, c_TER=c_TER if self.computes_c else None)

    def choice(self, scores_TE: torch.Tensor, ids_T: torch.Tensor | None) -> Chosen:
        """By the rule, or by the table."""
        if self.expert_table is None:
            return self.choose(scores_TE, self.expert_bias)
        assert ids_T is not None, "the model passes no token ids"
        _check_exact(self.expert_table, self.num_experts)
        return self.choose.of(scores_TE, self.expert_table[ids_T].long())

    def scores(self, x_TD: torch.Tensor, c_TER: torch.Tensor | None) -> torch.Tensor:
        """The scores of the experts, [T, E], in fp32."""
        raise NotImplementedError


def _check_exact(table_VK: torch.Tensor, num_experts: int) -> None:
    """vLLM gives every parameter the dtype of the model, also a table of integers."""
    dtype = table_VK.dtype
    if dtype.is_floating_point and num_experts > 2 / torch.finfo(dtype).eps:
        raise ValueError(
            f"a table of {num_experts} experts is not exact in {dtype}: serve the model in float32"
        )


class MoeParallelNormGate(MoeParallelGate):
    """Autonomy-of-Experts: the norm of C = x W_down, for every expert.

    A free expert has no C. Its score is a number, the same for all tokens.
    """

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__(config)
        self.free_scores = None
        if config.free_experts:
            self.free_scores = nn.Parameter(torch.empty(config.free_experts, dtype=torch.float32))

    def scores(self, x_TD: torch.Tensor, c_TER: torch.Tensor | None) -> torch.Tensor:
        assert c_TER is not None
        norms_TE = torch.linalg.vector_norm(c_TER.float(), dim=-1)
        if self.free_scores is None:
            return norms_TE
        free_TZ = self.free_scores.float().expand(norms_TE.shape[0], -1)
        return torch.cat([norms_TE, free_TZ], dim=1)


class MoeParallelRouter(MoeParallelGate):
    """Logits of one linear layer or two, without biases, in fp32."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__(config)
        e, d = config.num_experts + config.free_experts, config.hidden_size
        h = config.router_hidden_size
        self.router_in = None if h is None else nn.Parameter(torch.empty(h, d))
        self.router_out = nn.Parameter(torch.empty(e, d if h is None else h))

    def scores(self, x_TD: torch.Tensor, c_TER: torch.Tensor | None) -> torch.Tensor:
        h_TH = x_TD.float()
        if self.router_in is not None:
            h_TH = F.linear(h_TH, self.router_in.float())
        return F.linear(h_TH, self.router_out.float())


#: From x W_g and the activations of routing neurons to what their norm is taken of.
NORM_NODES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "activation": lambda gate, activation: activation,
    "silu": lambda gate, activation: F.silu(gate),
    "gate": lambda gate, activation: gate,
}


class MoeParallelNeuronGate(MoeParallelGate):
    """Union-of-Experts: the norm of the first neurons of each expert, whose output is kept.

    Together they are a SwiGLU layer of width E * R that computes every token.
    """

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__(config)
        assert config.routing_neurons is not None
        width = config.num_experts * config.routing_neurons
        self.neurons_in = nn.Parameter(torch.empty(2 * width, config.hidden_size))  # W_g above W_p
        self.neurons_out = nn.Parameter(torch.empty(config.hidden_size, width))
        self.node, self.weighs_output = NORM_NODES[config.norm_of], config.gate_routing

    def forward(
        self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> Selected:
        """From [T, D]."""
        halves = F.linear(hidden_states, self.neurons_in).chunk(2, dim=-1)
        gate_TER, up_TER = (x.unflatten(-1, (self.num_experts, -1)) for x in halves)
        u_TER = (F.silu(gate_TER.float()) * up_TER.float()).to(gate_TER.dtype)
        scores_TE = torch.linalg.vector_norm(self.node(gate_TER, u_TER).float(), dim=-1)
        weights_TK, index_TK = self.choice(scores_TE, token_ids)
        if self.weighs_output:
            weight_TE = torch.ones_like(scores_TE).scatter(1, index_TK, weights_TK)
            u_TER = u_TER * weight_TE[..., None].to(u_TER.dtype)
        output_TD = F.linear(u_TER.flatten(1), self.neurons_out)
        return Selected(scores_TE, weights_TK, index_TK, output_TD=output_TD)


GATES = {
    "router": MoeParallelRouter,
    "norms": MoeParallelNormGate,
    "neurons": MoeParallelNeuronGate,
}
