"""Small random models of transformers, one of each family, saved as it saves them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.data.small_text import small_bpe

VOCABULARY = 96
LENGTH = 13

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = EXPERTS | {"moe_intermediate_size": 16}

#: Angles of half of the frequencies change, already for a few positions.
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 100_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

#: By model_type: the options besides SIZES, each of which differs from its default.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
    "qwen2": {"rope_theta": 500.0},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen2_moe": QWEN_MOE
    | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "rope_theta": 500.0},
    "qwen3_moe": QWEN_MOE | {"head_dim": 16, "norm_topk_prob": True, "num_experts_per_tok": 3},
    "olmoe": EXPERTS | {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
}


@dataclass(frozen=True)
class Saved:
    """A saved model, and what transformers computes with it."""

    folder: Path
    tokens_BS: torch.Tensor
    logits_BSV: torch.Tensor


def build(model_type: str, **changes: Any) -> Any:
    """A model whose every weight is random, also norms and biases."""
    options = SIZES | MODELS[model_type] | changes
    if "rope_theta" in options:
        theta = options.pop("rope_theta")
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **options), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(len(model_type))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name
            weight.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Saved:
    """Save a model as transformers does; `options` are of save_pretrained."""
    model.save_pretrained(folder, **options)
    generator = torch.Generator().manual_seed(1)
    size = (2, LENGTH)
    tokens_BS = torch.randint(model.config.vocab_size, size, generator=generator)
    with torch.no_grad():
        return Saved(folder, tokens_BS, model(tokens_BS).logits.float())


def save_with_text(
    model_type: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> Saved:
    """A model with a tokenizer, as a folder of the hub has it."""
    tokenizer = text_tokenizer()
    changes = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eod} | changes
    saved = save(build(model_type, **changes).to(dtype), folder)
    tokenizer.save(folder)
    return saved


@cache
def text_tokenizer() -> Any:
    return small_bpe()
