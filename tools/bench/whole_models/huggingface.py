"""Hugging Face's Mixtral, or Qwen3-MoE from 16 experts on, with sdpa and each of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tools.bench.contender import BenchContender
from tools.bench.peers.huggingface import FINE_GRAINED, model_of
from tools.bench.whole_models.model import ModelTerms, contender_of

IMPLEMENTATIONS = ("grouped_mm", "eager")


def name_of(terms: ModelTerms, implementation: str) -> str:
    return f"{model_of(terms.size.n)} {implementation}"


def hugging_face_model(terms: ModelTerms, implementation: str) -> BenchContender:
    with torch.device(terms.device):
        model = _model(terms, implementation).to(terms.dtype)
    model.train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    batches = terms.batches()

    def loss() -> Tensor:
        tokens_BS, _ = next(batches)
        # The model shifts the labels itself, so it predicts one token less of each sequence.
        found: Tensor = model(input_ids=tokens_BS, labels=tokens_BS).loss
        return found

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return contender_of(name_of(terms, implementation), model, loss, step)


def _model(terms: ModelTerms, implementation: str) -> Any:
    size = terms.size
    common = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.d,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "head_dim": size.d // size.heads,
        "vocab_size": size.V,
        "num_experts_per_tok": size.K,
        "max_position_embeddings": size.S,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "experts_implementation": implementation,
    }
    if size.n >= FINE_GRAINED:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        experts = {"num_experts": size.n, "moe_intermediate_size": size.f, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts))

    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": size.n, "intermediate_size": size.f}
    return MixtralForCausalLM(MixtralConfig(**common, **experts))
