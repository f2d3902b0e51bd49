"""The configuration of the models in modeling_moe_parallel.py."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig


class MoeParallelConfig(PreTrainedConfig):
    """The shape of a model, and how it selects experts in inference.

    Attributes:
        moe_layers: for each layer, whether it has experts.
        rule: topk; top_p or relu, with one slot for each of `num_experts_per_tok` experts at most;
            threshold, all experts whose score plus bias is above `threshold`; hash, those that a
            table has for the token's id; or merge (Lory), by the mean of the prompt.
        scores: `router` logits, `norms` of x W_down (Autonomy-of-Experts), or norms of routing
            `neurons` (Union-of-Experts).
        scoring_func: softmax, sigmoid or raw: from scores to the weights of the chosen experts;
            with the rule threshold, one of GATES.
        norm_topk_prob: normalize these weights over the chosen experts.
        expert_bias: rank by score (norms) or probability (router) plus a bias.
        moe_top_p: p of the rule top_p. moe_top_p_strict: a sum of exactly p is not yet enough.
        n_group, topk_group: experts only from the best topk_group of n_group groups.
        low_rank_size: d_low. None: the scores are not norms, and W_g is one matrix.
        folded: W_g = W_down W_up was multiplied out. False, with a low_rank_size: it was not.
        router_hidden_size: width of a router of two layers. None: one layer.
        prefix_length: merge by the first tokens of the prompt, at most these. None: by all.
        segment_length: without a cache, merge for each segment of so many tokens by the mean of the
            segment before it, as in training. None: for the whole text, as with a cache.
        uniform_first_segment: the first segment takes all experts equally. False: its own mean.
        routing_neurons: of each expert, in addition to the moe_intermediate_size that the choice
            concerns. They compute every token.
        norm_of: what their norm is taken of: `activation`, SiLU(x W_g) * (x W_p); `silu`, SiLU(x
            W_g); or `gate`, x W_g.
        gate_routing: the routing neurons of a chosen expert count by its weight. False: by 1.
        zero_experts, copy_experts, constant_experts: free experts, which a token may choose in
            addition to the num_experts: their output is 0, x, or a mixture of x and a learned
            vector.
        zero_expert_gate: the weights of experts chosen with a zero expert: `keep` them, or
            `renormalize` them without it.
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
    moe_top_p: float = 1.0
    moe_top_p_strict: bool = False
    threshold: float = 0.0
    router_hidden_size: int | None = None
    low_rank_size: int | None = None
    folded: bool = False
    prefix_length: int | None = None
    segment_length: int | None = None
    uniform_first_segment: bool = False
    routing_neurons: int | None = None
    norm_of: str = "activation"
    gate_routing: bool = False
    zero_experts: int = 0
    copy_experts: int = 0
    constant_experts: int = 0
    zero_expert_gate: str = "keep"
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.moe_layers is None:
            self.moe_layers = [True] * self.num_hidden_layers
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)

    @property
    def free_experts(self) -> int:
        """Z, the number of free experts of a layer."""
        return self.zero_experts + self.copy_experts + self.constant_experts
