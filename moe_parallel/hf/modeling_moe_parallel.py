"""The models of moe_parallel for transformers 5, in inference. They need torch and transformers.

tools/export_hf.py copies this file, and the files from which it imports, next to the weights, for
`trust_remote_code`. `import moe_parallel.hf` registers the same classes. vLLM's transformers
backend replaces attention, linear layers and the modules `experts` whose parameters are all
3-dimensional; the selection stays here.

Shape suffixes: B sequences, S tokens of each, T = B * S, E experts, K slots per token, D model
width, R low-rank size (d_low).
"""

from __future__ import annotations

from typing import Any

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
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

# All files of the model are named here, because transformers copies those that this one names.
from .attention_moe_parallel import (
    MoeParallelAttention,
    MoeParallelRMSNorm,
    MoeParallelRotaryEmbedding,
)
from .configuration_moe_parallel import MoeParallelConfig
from .experts_moe_parallel import (
    MoeParallelFreeExperts,
    MoeParallelLowRankExperts,
    MoeParallelMergedExperts,
    MoeParallelMLP,
)
from .gates_moe_parallel import GATES, NORMALIZED, MoeParallelGate


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
        self.gate = GATES[config.scores](config)
        self.free_experts = MoeParallelFreeExperts(config) if config.free_experts else None
        self.experts = (MoeParallelLowRankExperts if low_rank else MoeParallelExperts)(config)
        width = config.shared_expert_intermediate_size
        self.shared_expert = None if width is None else MoeParallelMLP(config, width)
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
        aux_loss = None
        if outputs.router_logits and self.config.router_aux_loss_coef is not None:
            b, s, _ = outputs.last_hidden_state.shape
            aux_loss = self._load_balancing_loss(outputs.router_logits, b, s, attention_mask)
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def _load_balancing_loss(
        self, router_logits: tuple[torch.Tensor, ...], b: int, s: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The sum over layers of E sum_i f_i P_i, with E the number of scores, as in training.

        f_i: the share of the tokens that chose expert i, without gradient. P_i: the mean
        probability of expert i. They are of the batch, or of each sequence and then a mean of the
        losses. Padding does not count; a free expert counts free_expert_tau.
        """
        counts_BS1 = router_logits[0].new_ones(b, s, 1)
        if mask is not None and mask.dim() == 2:
            counts_BS1 = mask[:, -s:, None].to(counts_BS1)
        over = (1,) if self.config.aux_loss_by_sequence else (0, 1)
        tokens = counts_BS1.sum(over).clamp(min=1)
        mlps = [layer.mlp for layer in self.model.layers]
        gates = [mlp.gate for mlp in mlps if isinstance(mlp, MoeParallelSparseBlock)]
        losses = []
        for gate, scores_TE in zip(gates, router_logits, strict=True):
            with torch.no_grad():
                weights_TK, index_TK = gate.choice(scores_TE, None)
                is_chosen_TK = (weights_TK != 0).to(scores_TE.dtype)
                f_TE = torch.zeros_like(scores_TE).scatter_(1, index_TK, is_chosen_TK)
            p_TE = NORMALIZED[self.config.scoring_func](scores_TE)
            if self.config.free_experts:
                tau_TZ = p_TE[:, gate.num_experts :] * self.config.free_expert_tau
                p_TE = torch.cat([p_TE[:, : gate.num_experts], tau_TZ], dim=1)
            f, p = ((x.view(b, s, -1) * counts_BS1).sum(over) / tokens for x in (f_TE, p_TE))
            losses.append(f.shape[-1] * (f * p).sum(dim=-1).mean().to(counts_BS1.device))
        return torch.stack(losses).sum()

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
