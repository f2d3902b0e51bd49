"""The models of moe_parallel for transformers 5, in inference. It needs torch and transformers.

tools/export_hf.py copies this file beside the weights, for `trust_remote_code`. `import
moe_parallel.hf` registers the same classes. vLLM's transformers backend replaces attention, linear
layers and the modules `experts` whose parameters are all 3-dimensional; the selection stays here.

Shape suffixes: B sequences, S tokens of each, T = B * S, E experts, K slots per token, D model
width, F expert width, R low-rank size (d_low), H router width, G groups of experts, M experts of
a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs


class MoeParallelConfig(PreTrainedConfig):
    """The shape of a model, and how it selects experts in inference.

    Attributes:
        moe_layers: for each layer, whether it has experts.
        rule: topk; top_p, with one slot for each of `num_experts_per_tok` experts at most; or merge
            (Lory), by the mean of the prompt.
        scores: `router` logits, or `norms` of x W_down (Autonomy-of-Experts).
        scoring_func: softmax, sigmoid or raw: from scores to the weights of the chosen experts.
        norm_topk_prob: normalize these weights over the chosen experts.
        expert_bias: rank by score (norms) or probability (router) plus a bias.
        n_group, topk_group: experts only from the best topk_group of n_group groups.
        low_rank_size: d_low. None: the scores are no norms, and W_g is whole.
        folded: W_g = W_down W_up was multiplied out. False, with a low_rank_size: it was not.
        router_hidden_size: width of a router of two layers. None: one layer.
        prefix_length: merge by the first tokens of the prompt, at most these. None: by all.
        qk_norm: RMSNorm of queries and keys, per `head` or over `all` heads. None: there is none.
    """

    model_type = "moe_parallel"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "layers.*.mlp.down_proj": "rowwise",
        **{f"layers.*.mlp.shared_expert.{name}_proj": "colwise" for name in ("gate", "up")},
        "layers.*.mlp.shared_expert.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    attention_bias: bool = False
    qk_norm: str | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_parameters: dict | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    attention_dropout: float = 0.0
    output_router_logits: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    moe_layers: list[bool] | None = None
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 1024
    rule: str = "topk"
    scores: str = "router"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = True
    expert_bias: bool = False
    n_group: int | None = None
    topk_group: int | None = None
    top_p: float = 1.0
    top_p_strict: bool = False
    router_hidden_size: int | None = None
    low_rank_size: int | None = None
    folded: bool = False
    prefix_length: int | None = None
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.moe_layers is None:
            self.moe_layers = [True] * self.num_hidden_layers
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)


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


class MoeParallelRotaryEmbedding(nn.Module):
    """cos and sin of the positions' angles, [B, S, head_dim]."""

    inv_freq: torch.Tensor

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        assert config.rope_parameters is not None
        self.config, self.rope_type = config, config.rope_parameters["rope_type"]
        frequencies = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = frequencies(config)
        # `original_inv_freq`: transformers then fills both when it loads a model.
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: MoeParallelConfig, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, float]:
        assert config.rope_parameters is not None
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, S, head_dim] at its positions; channel i turns with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q K^T * scaling + mask) V, for groups of queries that share a key."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


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
        query = _rotated(self._heads(self.q_proj(hidden_states), self.q_norm), *position_embeddings)
        key = _rotated(self._heads(self.k_proj(hidden_states), self.k_norm), *position_embeddings)
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


class MoeParallelMLP(nn.Module):
    """A dense SwiGLU layer: (SiLU(x W_g) * (x W_p)) W_o."""

    def __init__(self, config: MoeParallelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


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

Chosen = tuple[torch.Tensor, torch.Tensor]  # weights (fp32) and experts, both [T, K]


class TopK:
    """The experts with the K highest scores, perhaps after a bias, perhaps of the best groups."""

    def __init__(self, config: MoeParallelConfig) -> None:
        self.k, self.groups, self.chosen_groups = (
            config.num_experts_per_tok, config.n_group, config.topk_group
        )  # fmt: skip
        self.weight = WHOLE[config.scoring_func]
        self.normalized = NORMALIZED[config.scoring_func] if config.norm_topk_prob else None
        changes_order = config.expert_bias or config.n_group is not None
        by_probability = config.scores == "router" and changes_order
        self.rank = self.weight if by_probability else WHOLE["raw"]

    def __call__(self, scores_TE: torch.Tensor, bias_E: torch.Tensor | None) -> Chosen:
        ranked_TE = self.rank(scores_TE)
        if bias_E is not None:
            ranked_TE = ranked_TE + bias_E
        if self.groups is not None:
            ranked_TE = self._of_best_groups(ranked_TE)
        index_TK = ranked_TE.topk(self.k, dim=-1).indices
        if self.normalized is not None:
            return self.normalized(scores_TE.gather(1, index_TK)), index_TK
        return self.weight(scores_TE).gather(1, index_TK), index_TK

    def _of_best_groups(self, ranked_TE: torch.Tensor) -> torch.Tensor:
        """-inf for experts of other groups. A group counts by its best K / topk_group experts."""
        assert self.groups is not None and self.chosen_groups is not None
        ranked_TGM = ranked_TE.unflatten(1, (self.groups, -1))
        best = ranked_TGM.topk(max(1, self.k // self.chosen_groups), dim=2).values
        groups = best.sum(dim=2).topk(self.chosen_groups, dim=1).indices
        others_TG = torch.ones_like(best[..., 0], dtype=torch.bool).scatter(1, groups, False)
        return ranked_TGM.masked_fill(others_TG[..., None], -torch.inf).flatten(1)


class TopP:
    """The most probable experts until their probabilities reach p; other slots have weight 0."""

    ROUNDING = 1e-6  # fp32 probabilities sum to 1 only within it

    def __init__(self, config: MoeParallelConfig) -> None:
        self.p, self.cap = config.top_p, config.num_experts_per_tok
        self.inclusive = config.top_p_strict or config.top_p == 1

    def __call__(self, scores_TE: torch.Tensor, bias_E: torch.Tensor | None) -> Chosen:
        weights_TK, index_TK = scores_TE.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        before_TK = weights_TK.double().cumsum(dim=-1) - weights_TK.double()
        if self.inclusive:
            needed_TK = before_TK <= self.p + self.ROUNDING
        else:
            needed_TK = before_TK < self.p - self.ROUNDING
        needed_TK = needed_TK | (before_TK == 0)  # at least one
        return (weights_TK * needed_TK)[:, : self.cap], index_TK[:, : self.cap]


RULES: dict[str, Callable[[MoeParallelConfig], Any]] = {"topk": TopK, "top_p": TopP}


class MoeParallelGate(nn.Module):
    """Selects experts by scores. vLLM leaves it alone, because no parameter is named `weight`."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        self.choose = RULES[config.rule](config)
        self.num_experts = config.num_experts
        self.expert_bias = None  # no buffer, because vLLM loads parameters only
        if config.expert_bias:
            bias_E = torch.zeros(config.num_experts, dtype=torch.float32)
            self.expert_bias = nn.Parameter(bias_E, requires_grad=False)
        self.computes_c = config.low_rank_size is not None and not config.folded
        self.w_down = None
        if self.computes_c or config.scores == "norms":
            assert config.low_rank_size is not None
            rows = config.num_experts * config.low_rank_size
            self.w_down = nn.Parameter(torch.empty(rows, config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, D] -> scores [T, E], weights [T, K], experts [T, K], and C for low-rank experts"""
        c_TER = None
        if self.w_down is not None:
            c_TER = F.linear(hidden_states, self.w_down).unflatten(-1, (self.num_experts, -1))
        scores_TE = self.scores(hidden_states, c_TER)
        selected = (scores_TE, *self.choose(scores_TE, self.expert_bias))
        return (*selected, c_TER) if c_TER is not None and self.computes_c else selected

    def scores(self, x_TD: torch.Tensor, c_TER: torch.Tensor | None) -> torch.Tensor:
        """The scores of the experts, [T, E], in fp32."""
        raise NotImplementedError


class MoeParallelNormGate(MoeParallelGate):
    """Autonomy-of-Experts: the norm of C = x W_down, for every expert."""

    def scores(self, x_TD: torch.Tensor, c_TER: torch.Tensor | None) -> torch.Tensor:
        assert c_TER is not None
        return torch.linalg.vector_norm(c_TER.float(), dim=-1)


class MoeParallelRouter(MoeParallelGate):
    """Logits of one linear layer or two, without biases, in fp32."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__(config)
        e, d, h = config.num_experts, config.hidden_size, config.router_hidden_size
        self.router_in = None if h is None else nn.Parameter(torch.empty(h, d))
        self.router_out = nn.Parameter(torch.empty(e, d if h is None else h))

    def scores(self, x_TD: torch.Tensor, c_TER: torch.Tensor | None) -> torch.Tensor:
        h_TH = x_TD.float()
        if self.router_in is not None:
            h_TH = F.linear(h_TH, self.router_in.float())
        return F.linear(h_TH, self.router_out.float())


GATES = {"router": MoeParallelRouter, "norms": MoeParallelNormGate}


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


class MoeParallelSparseBlock(nn.Module):
    """The chosen experts of each token, and the shared expert if there is one."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        low_rank = config.low_rank_size is not None and not config.folded
        self.gate = GATES[config.scores](config)
        self.experts = (MoeParallelLowRankExperts if low_rank else MoeParallelExperts)(config)
        width = config.shared_expert_intermediate_size
        self.shared_expert = None if width is None else MoeParallelMLP(config, width)
        self.shared_expert_gate = None
        if config.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights_TK, index_TK, *c_TER = self.gate(x_TD)
        y_TD = self.experts(x_TD, index_TK, weights_TK, *c_TER)
        if self.shared_expert is not None:
            shared_TD = self.shared_expert(x_TD)
            if self.shared_expert_gate is not None:
                gate_T1 = torch.sigmoid(self.shared_expert_gate(x_TD).float())
                shared_TD = shared_TD * gate_T1.to(shared_TD.dtype)
            y_TD = y_TD + shared_TD
        return y_TD.view(hidden_states.shape)


class MoeParallelMergedExperts(nn.Module):
    """Lory: one SwiGLU expert for each sequence, the weighted sum of all experts' matrices."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__()
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.prefix = config.prefix_length
        self.router_out = nn.Parameter(torch.empty(e, d))
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def merge(
        self, prompt: torch.Tensor, is_token_BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The merged expert of each prompt [B, S, D], by the mean of its tokens."""
        counts_BS = torch.ones_like(prompt[..., 0], dtype=torch.float32)
        if is_token_BS is not None:
            counts_BS = is_token_BS.to(counts_BS)
        if self.prefix is not None:
            counts_BS = counts_BS * (counts_BS.cumsum(dim=1) <= self.prefix)
        mean_BD = (prompt.float() * counts_BS[..., None]).sum(dim=1)
        mean_BD = mean_BD / counts_BS.sum(dim=1, keepdim=True)
        e_BE = F.linear(mean_BD, self.router_out.float()).softmax(dim=-1)
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


class MoeParallelDecoderLayer(GradientCheckpointingLayer):
    """Attention, then a dense layer or experts; each after a norm and beside a residual."""

    def __init__(self, config: MoeParallelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = MoeParallelAttention(config, layer_idx)
        self.input_layernorm = MoeParallelRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MoeParallelRMSNorm(config.hidden_size, config.rms_norm_eps)
        assert config.moe_layers is not None
        if not config.moe_layers[layer_idx]:
            self.mlp: nn.Module = MoeParallelMLP(config, config.intermediate_size)
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
        if not isinstance(self.mlp, MoeParallelMergedExperts):
            return hidden_states + self.mlp(x)
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
    _keep_in_fp32_modules_strict = ["expert_bias"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "router_logits": OutputRecorder(MoeParallelGate, index=0),
        "hidden_states": MoeParallelDecoderLayer,
        "attentions": MoeParallelAttention,
    }

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """transformers' default, a grouped product, needs rows of a multiple of 16 bytes."""
        widths = self.config.hidden_size, self.config.moe_intermediate_size
        if requested_experts is None and any(width % 8 for width in widths):
            return "eager"
        return super().get_correct_experts_implementation(requested_experts)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name == "expert_bias":
                init.zeros_(parameter)
            elif name not in ("weight", "bias"):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class MoeParallelModel(MoeParallelPreTrainedModel):
    """The model without its output layer."""

    def __init__(self, config: MoeParallelConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [MoeParallelDecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = MoeParallelRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MoeParallelRotaryEmbedding(config)
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
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        if self.config.rule == "merge":
            kwargs |= self._merges(attention_mask, past_key_values, int(past))
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
                "Lory takes an attention mask [batch, tokens], which tells the padding"
            )
        held: Any = cache
        if held is None:
            return {"is_token": attention_mask}
        if not past or not hasattr(held, "merged_experts"):
            held.merged_experts = {}
        return {"merged": held.merged_experts, "is_token": attention_mask}


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
        if self.config.rule == "merge" and inputs.get("past_key_values") is None:
            raise ValueError(
                "without a cache every new token would change the merge that Lory makes for the "
                "prompt: leave out use_cache=False"
            )
        return inputs
