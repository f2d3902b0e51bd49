"""A model of this project as Hugging Face's Mixtral: same weights, other code."""

from __future__ import annotations

from typing import Any

import torch
import transformers  # its models are imported at use, not by every rank that imports this module

from moe_parallel.generation.language_model import GenerationModel


def as_mixtral(model: GenerationModel) -> transformers.MixtralForCausalLM:
    """For `topk` with K = 2 and tied embeddings, complete on one process."""
    config = model.config
    weights = {name: w for name, w in model.chunk.state_dict().items() if w is not None}
    embedding = weights["embedding.word_embeddings.weight"]
    peer = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=len(embedding),
            hidden_size=config.model.hidden_size,
            intermediate_size=config.expert_width,
            num_hidden_layers=config.model.num_layers,
            num_attention_heads=config.model.num_attention_heads,
            num_key_value_heads=config.model.query_groups,
            head_dim=config.model.hidden_size // config.model.num_attention_heads,
            num_local_experts=config.num_experts,
            num_experts_per_tok=2,
            rms_norm_eps=config.model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": config.model.rotary_base},
            max_position_embeddings=config.training.seq_length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    theirs = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    theirs["model.norm.weight"] = weights["decoder.final_layernorm.weight"]
    for number in range(config.model.num_layers):
        theirs |= _layer(f"decoder.layers.{number}.", f"model.layers.{number}.", weights, config)
    peer.load_state_dict(theirs)
    return peer.eval()


def _layer(
    ours: str, theirs: str, weights: dict[str, torch.Tensor], config: Any
) -> dict[str, torch.Tensor]:
    groups = config.model.query_groups
    heads = config.model.num_attention_heads // groups
    qkv = weights[ours + "self_attention.linear_qkv.weight"].unflatten(0, (groups, heads + 2, -1))
    w_gate_up = weights[ours + "mlp.experts.w_gate_up_LD2F"]
    return {
        theirs + "input_layernorm.weight": weights[ours + "input_layernorm.weight"],
        theirs + "post_attention_layernorm.weight": weights[ours + "pre_mlp_layernorm.weight"],
        theirs + "self_attn.q_proj.weight": qkv[:, :heads].flatten(0, 2),
        theirs + "self_attn.k_proj.weight": qkv[:, heads].flatten(0, 1),
        theirs + "self_attn.v_proj.weight": qkv[:, heads + 1].flatten(0, 1),
        theirs + "self_attn.o_proj.weight": weights[ours + "self_attention.linear_proj.weight"],
        theirs + "mlp.gate.weight": weights[ours + "mlp.w_router_ED"],
        theirs + "mlp.experts.gate_up_proj": w_gate_up.permute(0, 2, 3, 1).flatten(1, 2),
        theirs + "mlp.experts.down_proj": weights[ours + "mlp.experts.w_out_LFD"].mT,
    }
