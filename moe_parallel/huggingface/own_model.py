"""Our own architecture in transformers (`moe_parallel.hf`): its config.json and its tensors."""

from __future__ import annotations

from typing import Any

from moe_parallel.config import Config
from moe_parallel.huggingface.configuration import rope_fields
from moe_parallel.huggingface.own_layers import exported_layer
from moe_parallel.huggingface.own_rules import loss_fields, rule_fields
from moe_parallel.huggingface.own_steps import (
    LayerSource,
    dispatched_width,
    folded_width,
    low_rank_size,
)
from moe_parallel.huggingface.places import (
    attention_places,
    dense_places,
    embedding_places,
    head_places,
)
from moe_parallel.huggingface.steps import Step, plain_steps

MODEL_TYPE = "moe_parallel"
ARCHITECTURE = "MoeParallelForCausalLM"
CODE = "*_moe_parallel.py"  # the files of moe_parallel/hf that are copied next to the weights
_MODELING = "modeling_moe_parallel"
AUTO_MAP = {
    "AutoConfig": "configuration_moe_parallel.MoeParallelConfig",
    "AutoModel": f"{_MODELING}.MoeParallelModel",
    "AutoModelForCausalLM": f"{_MODELING}.{ARCHITECTURE}",
}


def own_config_json(config: Config, vocab_size: int, *, fold: bool) -> dict[str, Any]:
    """The config.json (MoeParallelConfig) of a model of `config`, with the rule of evaluations.

    Args:
        vocab_size: of the tensors that are written, without our padding.
        fold: W_g = W_down W_up is multiplied out.

    Raises InputError for a system that has no exported form.
    """
    model = config.model
    fields: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "auto_map": AUTO_MAP,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_width,
        "attention_bias": model.add_qkv_bias,
        "qk_norm": _qk_norm(model.qk_layernorm, model.qk_layernorm_all_heads),
        "max_position_embeddings": config.positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": rope_fields(model)["rope_parameters"],
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "moe_layers": list(config.moe_layers),
    }
    if config.moe.num_experts is None:
        return fields
    selection, n = config.selection, config.num_experts
    width = folded_width(config) if fold else dispatched_width(config)
    fields |= {"num_experts": n, "moe_intermediate_size": width}
    fields |= rule_fields(selection, n + selection.free_experts)
    fields |= exported_layer(config).fields(config) | loss_fields(config)
    if low_rank_size(selection) is not None:
        fields |= {"low_rank_size": low_rank_size(selection), "folded": fold}
    fields["expert_bias"] = selection.adds_bias
    return fields


def own_steps(config: Config, vocab_size: int, *, fold: bool) -> list[Step]:
    """The steps of our own architecture, layer by layer. `fold`: multiply W_down W_up out."""
    steps = plain_steps(embedding_places(config, vocab_size))
    for layer, is_moe in enumerate(config.moe_layers):
        steps += plain_steps(attention_places(config.model, layer))
        if is_moe:
            steps += exported_layer(config).steps(LayerSource(config, layer, vocab_size, fold))
        else:
            steps += plain_steps(dense_places(config, layer))
    return steps + plain_steps(head_places(config, vocab_size))


def _qk_norm(normed: bool, all_heads: bool) -> str | None:
    if not normed:
        return None
    return "all" if all_heads else "head"
