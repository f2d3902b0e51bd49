"""The models of moe_parallel for transformers 5, in inference. They need torch and transformers.

tools/export_hf.py copies this file, configuration_moe_parallel.py and, as rules_moe_parallel.py,
the rules that the training selects experts by next to the weights, for `trust_remote_code`. `import
moe_parallel.hf` registers the same classes. vLLM's transformers backend replaces attention, linear
layers and the modules `experts` whose parameters are all 3-dimensional; the selection stays here.

Shape suffixes: B sequences, S tokens of each, T = B * S, E experts, K slots per token, D model
width, R low-rank size (d_low) or routing neurons of an expert, H router width, Z free experts, C
constant experts, A the two parts of their output, V token ids. In scores, E includes the free
experts, which come last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_moe_parallel import MoeParallelConfig
from .rules_moe_parallel import (
    FIRST_SEGMENT,
    GATES,
    NODES,
    PROBS,
    FreeChoices,
    GroupLimit,
    WithoutZeroExperts,
    above,
    greatest,
    ranked_for_topk,
    renormalized,
    shifted,
    softmax,
    until_p,
)


class MoeParallelRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32."""

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


class MoeParallelAttention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: MoeParallelConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = config.head_dim**-0.5, True
        d, bias = config.hidden_size, config.attention_bias
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(d, q_width, bias=bias)
        self.k_proj = nn.Linear(d, kv_width, bias=bias)
        self.v_proj = nn.Linear(d, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, d, bias=False)
        self.norms_all_heads = config.qk_norm == "all"
        widths = {"all": (q_width, kv_width), "head": (config.head_dim, config.head_dim)}
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            self.q_norm, self.k_norm = (
                MoeParallelRMSNorm(width, config.rms_norm_eps) for width in widths[config.qk_norm]
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.norms_all_heads and getattr(self.q_proj, "tp_size", 1) > 1:  # a layer of vLLM
            raise ValueError(
                "the norm of queries and keys spans all heads, and vLLM divides the heads over its "
                f"ranks: set tensor_parallel_size to 1 instead of {self.q_proj.tp_size}"
            )
        query = self._heads(self.q_proj(hidden_states), self.q_norm)
        key = self._heads(self.k_proj(hidden_states), self.k_norm)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        value = self._heads(self.v_proj(hidden_states), None)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _heads(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """[B, S, heads * head_dim] -> [B, heads, S, head_dim]"""
        if norm is not None and self.norms_all_heads:
            x = norm(x)
        x = x.view(*x.shape[:-1], -1, self.head_dim)
        if norm is not None and not self.norms_all_heads:
            x = norm(x)
        return x.transpose(1, 2)


Chosen = tuple[torch.Tensor, torch.Tensor]  # weights (fp32) and experts, both [T, K]


def _weighed(config: MoeParallelConfig, scores_TE: torch.Tensor, index_TK: torch.Tensor) -> Chosen:
    probs = PROBS[config.scoring_func, config.norm_topk_prob]
    if config.zero_expert_gate == "renormalize":
        probs = WithoutZeroExperts(probs, config.free_experts, config.zero_experts)
    return probs(scores_TE, softmax(scores_TE), index_TK), index_TK


def _topk(
    config: MoeParallelConfig, scores_TE: torch.Tensor, bias_E: torch.Tensor | None
) -> Chosen:
    """The K highest scores, perhaps after a bias, perhaps of the best groups."""
    k, ranking, groups = config.num_experts_per_tok, None, None
    if config.scores == "router":
        ranking = torch.sigmoid if config.scoring_func == "sigmoid" else softmax
    if config.n_group is not None:
        assert config.topk_group is not None
        groups = GroupLimit(config.n_group, config.topk_group)
    ranked_TE, ties_TE = ranked_for_topk(scores_TE.detach(), k, ranking, bias_E, groups)
    return _weighed(config, scores_TE, greatest(ranked_TE, k, ties_TE))


def _top_p(
    config: MoeParallelConfig, scores_TE: torch.Tensor, bias_E: torch.Tensor | None
) -> Chosen:
    """The most probable experts until their probabilities reach p; other slots have weight 0."""
    index_TE, probs_TE, needed_TE = until_p(
        scores_TE, softmax(scores_TE), config.moe_top_p, config.moe_top_p_strict
    )
    index_TK, probs_TK, needed_TK = (
        x_TE[:, : config.num_experts_per_tok] for x_TE in (index_TE, probs_TE, needed_TE)
    )
    if config.norm_topk_prob:
        return renormalized(probs_TK, needed_TK), index_TK
    return probs_TK * needed_TK, index_TK


def _threshold(
    config: MoeParallelConfig, scores_TE: torch.Tensor, bias_E: torch.Tensor | None
) -> Chosen:
    """The experts whose score plus bias is above a threshold; the slots of others have weight 0."""
    chosen_TE, probs_TE, _ = above(scores_TE, bias_E, config.threshold, GATES[config.scoring_func])
    index_E = torch.arange(scores_TE.shape[1], device=scores_TE.device)
    return probs_TE * chosen_TE, index_E.expand_as(scores_TE)


def _relu(
    config: MoeParallelConfig, scores_TE: torch.Tensor, bias_E: torch.Tensor | None
) -> Chosen:
    """Every expert with a positive score, which is its weight; other slots have weight 0."""
    index_TK = greatest(scores_TE, config.num_experts_per_tok)
    return torch.relu(scores_TE).gather(1, index_TK), index_TK


RULES = {"topk": _topk, "top_p": _top_p, "relu": _relu, "threshold": _threshold}


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
        self.config, self.num_experts = config, config.num_experts
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
            return RULES[self.config.rule](self.config, scores_TE, self.expert_bias)
        assert ids_T is not None, "the model passes no token ids"
        _check_exact(self.expert_table, self.num_experts)
        return _weighed(self.config, scores_TE, self.expert_table[ids_T].long())

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
        self.node, self.weighs_output = NODES[config.norm_of], config.gate_routing

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


GATES_OF = {
    "router": MoeParallelRouter,
    "norms": MoeParallelNormGate,
    "neurons": MoeParallelNeuronGate,
}


class MoeParallelFreeExperts(nn.Module):
    """Experts without matrices: 0, the input x, or a_1 x + a_2 v, (a_1, a_2) = softmax(x W_c^T).

    Their scores are the last: those of zero experts, then copies, then constant experts (MoE++).
    """

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        self.choices = FreeChoices(
            config.num_experts, config.zero_experts, config.copy_experts, config.constant_experts
        )
        self.w_constant = self.v_constant = None
        if config.constant_experts:
            c, d = config.constant_experts, config.hidden_size
            self.w_constant = nn.Parameter(torch.empty(c, 2, d))
            self.v_constant = nn.Parameter(torch.empty(c, d))

    def forward(
        self, x_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The choices of the other experts, their weights, and the output of the free ones."""
        is_free_TK, probs_TZ = self.choices.divided(index_TK, weights_TK)
        logits_TCA = None
        if self.w_constant is not None:
            logits_TCA = torch.einsum("td,cad->tca", x_TD.float(), self.w_constant.float())
        output_TD = self.choices.output(x_TD, probs_TZ, logits_TCA, self.v_constant)
        # Kernels want an expert in each slot, so a free choice becomes any of them with weight 0.
        others_TK = weights_TK.masked_fill(is_free_TK, 0)
        return index_TK % self.choices.num_experts, others_TK, output_TD


class MoeParallelLowRankExperts(nn.Module):
    """E(x) = (SiLU(C W_up) * (x W_p)) W_o, with C = x W_down from the gate.

    The W_up of all experts are one 2-dimensional matrix, so that vLLM does not take the module for
    SwiGLU experts. It then computes with this forward pass.
    """

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        assert config.low_rank_size is not None
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = e
        self.gate_proj = nn.Parameter(torch.empty(e * f, config.low_rank_size))
        self.up_proj = nn.Parameter(torch.empty(e, f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        low_rank_states: torch.Tensor,
    ) -> torch.Tensor:
        """[T, D], [T, K], [T, K], C [T, E, R] -> [T, D]"""
        y_TD = torch.zeros_like(hidden_states)
        gates = self.gate_proj.chunk(self.num_experts)
        for expert in range(self.num_experts):
            weight_T = (top_k_weights * (top_k_index == expert)).sum(dim=-1)
            if torch.compiler.is_compiling():  # all tokens, because no size may depend on data
                token: Any = slice(None)
            else:
                token = weight_T.nonzero()[:, 0]
            gate = F.silu(F.linear(low_rank_states[token, expert], gates[expert]))
            up = F.linear(hidden_states[token], self.up_proj[expert])
            y = F.linear(gate * up, self.down_proj[expert]) * weight_T[token, None]
            y_TD[token] += y.to(y_TD.dtype)
        return y_TD


class MoeParallelMergedExperts(nn.Module):
    """Lory: one SwiGLU expert for each sequence, the weighted sum of all experts' matrices."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.config = config
        self.router_out = nn.Parameter(torch.empty(e, d))
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def merge(
        self, prompt: torch.Tensor, is_token_BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The merged expert of each prompt [B, S, D], by the mean of its tokens."""
        return self._merged(self._weights(prompt, is_token_BS))

    def _weights(self, prompt: torch.Tensor, is_token_BS: torch.Tensor | None) -> torch.Tensor:
        """[B, E]"""
        counts_BS = torch.ones_like(prompt[..., 0], dtype=torch.float32)
        if is_token_BS is not None:
            counts_BS = is_token_BS.to(counts_BS)
        if self.config.prefix_length is not None:
            counts_BS = counts_BS * (counts_BS.cumsum(dim=1) <= self.config.prefix_length)
        mean_BD = (prompt.float() * counts_BS[..., None]).sum(dim=1)
        mean_BD = mean_BD / counts_BS.sum(dim=1, keepdim=True)
        return F.linear(mean_BD, self.router_out.float()).softmax(dim=-1)

    def _merged(self, e_BE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = (
            torch.einsum("be,eij->bij", e_BE, matrix.float()).to(matrix.dtype)
            for matrix in (self.gate_up_proj, self.down_proj)
        )
        return gate_up, down

    def forward(
        self, hidden_states: torch.Tensor, merged: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[B, S, D] through the merged expert of each sequence."""
        gate, up = (hidden_states @ merged[0].transpose(1, 2)).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ merged[1].transpose(1, 2)

    def by_segments(self, x_BSD: torch.Tensor, is_token_BS: torch.Tensor | None) -> torch.Tensor:
        """[B, S, D], each segment through the merge of the one before it."""
        assert self.config.segment_length is not None
        first = FIRST_SEGMENT["uniform" if self.config.uniform_first_segment else "own"]
        y_BSD = torch.zeros_like(x_BSD)
        for row, x_SD in enumerate(x_BSD):
            places = torch.arange(len(x_SD), device=x_SD.device)
            if is_token_BS is not None:
                places = places[is_token_BS[row].bool()]
            segments = places.split(self.config.segment_length)
            e_GBE = torch.stack([self._weights(x_SD[None, each], None) for each in segments])
            for segment, e_BE in zip(segments, shifted(e_GBE, first), strict=True):
                y_BSD[row, segment] = self(x_SD[None, segment], self._merged(e_BE))[0]
        return y_BSD


# In this file, because transformers looks for the decorator in the source of the models.
@use_experts_implementation
class MoeParallelExperts(nn.Module):
    """SwiGLU experts. transformers and vLLM may compute them with kernels of their own."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = e
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))  # W_g above W_p
        self.down_proj = nn.Parameter(torch.empty(e, d, f))
        self.act_fn = nn.SiLU()

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, D], [T, K], [T, K] -> [T, D]"""
        y_TD = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where((top_k_index == expert) & (top_k_weights != 0))
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            y_TD.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(y_TD.dtype))
        return y_TD


class MoeParallelSparseBlock(nn.Module):
    """The chosen experts, free or not, and what computes every token in addition to them."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        low_rank = config.low_rank_size is not None and not config.folded
        self.gate = GATES_OF[config.scores](config)
        self.free_experts = MoeParallelFreeExperts(config) if config.free_experts else None
        self.experts = (MoeParallelLowRankExperts if low_rank else MoeParallelExperts)(config)
        width = config.shared_expert_intermediate_size
        self.shared_expert = None if width is None else Qwen2MoeMLP(config, width)
        self.shared_expert_gate = None
        if config.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids_T = None if token_ids is None else token_ids.reshape(-1)
        # Two arguments always: vLLM would do the selection of a gate that takes the states alone.
        _, weights_TK, index_TK, c_TER, beside_TD = self.gate(x_TD, ids_T)
        if self.free_experts is not None:
            index_TK, weights_TK, beside_TD = self.free_experts(x_TD, index_TK, weights_TK)
        of_gate = () if c_TER is None else (c_TER,)
        y_TD = self.experts(x_TD, index_TK, weights_TK, *of_gate)
        if beside_TD is not None:
            y_TD = y_TD + beside_TD
        if self.shared_expert is not None:
            shared_TD = self.shared_expert(x_TD)
            if self.shared_expert_gate is not None:
                gate_T1 = torch.sigmoid(self.shared_expert_gate(x_TD).float())
                shared_TD = shared_TD * gate_T1.to(shared_TD.dtype)
            y_TD = y_TD + shared_TD
        return y_TD.view(hidden_states.shape)


class MoeParallelDecoderLayer(GradientCheckpointingLayer):
    """Attention, then a dense layer or experts; each after a norm and with a residual."""

    def __init__(self, config: MoeParallelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = MoeParallelAttention(config, layer_idx)
        self.input_layernorm = MoeParallelRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MoeParallelRMSNorm(config.hidden_size, config.rms_norm_eps)
        assert config.moe_layers is not None
        if not config.moe_layers[layer_idx]:
            self.mlp: nn.Module = Qwen2MoeMLP(config, config.intermediate_size)
        elif config.rule == "merge":
            self.mlp = MoeParallelMergedExperts(config)
        else:
            self.mlp = MoeParallelSparseBlock(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        merged: dict[int, Any] | None = None,
        is_token: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        x = self.post_attention_layernorm(hidden_states)
        if isinstance(self.mlp, MoeParallelSparseBlock):
            return hidden_states + self.mlp(x, token_ids)
        if not isinstance(self.mlp, MoeParallelMergedExperts):
            return hidden_states + self.mlp(x)
        if merged is None and self.mlp.config.segment_length is not None:
            return hidden_states + self.mlp.by_segments(x, is_token)
        of_prompt = None if merged is None else merged.get(self.layer_idx)
        if of_prompt is None:
            of_prompt = self.mlp.merge(x, is_token)
        if merged is not None:
            merged[self.layer_idx] = of_prompt
        return hidden_states + self.mlp(x, of_prompt)


class MoeParallelPreTrainedModel(PreTrainedModel):
    """What all models of this file tell transformers about themselves."""

    config: MoeParallelConfig
    config_class = MoeParallelConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoeParallelDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["expert_bias", "free_scores"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "router_logits": OutputRecorder(MoeParallelGate, index=0),
        "hidden_states": MoeParallelDecoderLayer,
        "attentions": MoeParallelAttention,
    }

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which lets every parameter ask for a gradient: a bias gets none."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, parameter in model.named_parameters():
            if name.endswith("expert_bias"):
                parameter.requires_grad_(False)
        return loaded

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """transformers' default, a grouped product, needs rows of a multiple of 16 bytes."""
        widths = self.config.hidden_size, self.config.moe_intermediate_size
        if requested_experts is None and any(width % 8 for width in widths):
            return "eager"
        return super().get_correct_experts_implementation(requested_experts)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        for name, parameter in module.named_parameters(recurse=False):
            if name == "expert_bias":
                init.zeros_(parameter)
            elif name == "expert_table":  # the experts in turn
                turns = torch.arange(parameter.numel(), device=parameter.device)
                init.copy_(parameter, (turns % self.config.num_experts).view_as(parameter))
            elif name == "free_scores":  # as large as the norms of C for an x of RMS 1
                assert self.config.low_rank_size is not None
                size = self.config.hidden_size * self.config.low_rank_size
                init.constant_(parameter, std * size**0.5)
            elif name not in ("weight", "bias"):
                init.normal_(parameter, mean=0.0, std=1.0 if name == "v_constant" else std)


class MoeParallelModel(MoeParallelPreTrainedModel):
    """The model without its output layer."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [MoeParallelDecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = MoeParallelRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device) + past
            position_ids = position_ids[None]
        mask = create_causal_mask(
            self.config, hidden_states, attention_mask, past_key_values, position_ids=position_ids
        )
        if self.config.rule == "merge":
            kwargs |= self._merges(attention_mask, past_key_values, int(past))
        if self.config.rule == "hash":
            kwargs["token_ids"] = _given(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return MoeModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )

    def _merges(
        self, attention_mask: torch.Tensor | None, cache: Cache | None, past: int
    ) -> dict[str, Any]:
        """The merged experts of each layer, which stay with the cache of the prompt they are of."""
        attention = self.config._attn_implementation or "eager"
        if attention.startswith(("vllm", "paged")):
            raise ValueError(
                "Lory merges the experts for each prompt, and this server computes tokens of "
                "several prompts together: use generate()"
            )
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                "Lory takes an attention mask [batch, tokens], which shows the padding"
            )
        held: Any = cache
        if held is None:
            return {"is_token": attention_mask}
        if not past or not hasattr(held, "merged_experts"):
            held.merged_experts = {}
        return {"merged": held.merged_experts, "is_token": attention_mask}


def _given(input_ids: torch.Tensor | None) -> torch.Tensor:
    if input_ids is None:
        raise ValueError(
            "experts are chosen by token id, and inputs_embeds has no ids: give input_ids, or "
            "serve the model without pipeline parallelism"
        )
    return input_ids


class MoeParallelForCausalLM(MoeParallelPreTrainedModel, GenerationMixin):
    """The model with its output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__(config)
        self.model = MoeParallelModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if "cache" in inputs:  # the name that transformers 5.24 and later give it
            inputs["past_key_values"] = inputs.pop("cache")
        if self.config.rule == "merge":
            lengths = self.config.prefix_length, self.config.segment_length
            if inputs.get("past_key_values") is None and lengths == (None, None):
                raise ValueError(
                    "without a cache every new token would change the merge that Lory makes for "
                    "the prompt: leave out use_cache=False"
                )
            # For a static cache transformers makes a mask that does not show the padding.
            inputs["attention_mask"] = kwargs.get("attention_mask")
        return inputs
