"""Megatron-Core's own GPTModel with its MoELayer, without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tools.bench.contender import Contender
from tools.bench.whole_models.model import Terms, contender_of

NAME = "Megatron GPTModel"


def stock_model(terms: Terms) -> Contender:
    size = terms.size
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.d,
        num_attention_heads=size.heads,
        num_query_groups=size.key_value_heads,
        ffn_hidden_size=size.f,
        num_moe_experts=size.n,
        moe_ffn_hidden_size=size.f,
        moe_router_topk=size.K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=terms.dtype == torch.bfloat16,
        params_dtype=terms.dtype,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=size.n, normalization="RMSNorm"),
        vocab_size=size.V,
        max_sequence_length=size.S,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    chunk = Float16Module(config, gpt) if config.bf16 else gpt
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, chunk)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=config.bf16, params_dtype=terms.dtype
        ),
        [model],
    )
    positions_BS = torch.arange(size.S).expand(size.B, -1)
    causal_SS = torch.ones(1, 1, size.S, size.S, dtype=torch.bool).triu(1)  # True: is not seen

    def loss() -> Tensor:
        losses_BS: Tensor = model(terms.tokens_BS, positions_BS, causal_SS, labels=terms.labels_BS)
        return losses_BS.float().mean()

    return contender_of(NAME, model, loss, optimizer.step)
