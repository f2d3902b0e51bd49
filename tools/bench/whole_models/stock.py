"""Megatron-Core's own GPTModel with its MoELayer, without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from tools.bench.contender import BenchContender
from tools.bench.peers.megatron import moe_config
from tools.bench.whole_models.model import ModelTerms, contender_of

NAME = "Megatron GPTModel"


def stock_model(terms: ModelTerms) -> BenchContender:
    size = terms.size
    config = moe_config(
        size,
        terms.dtype,
        num_layers=size.layers,
        num_attention_heads=size.heads,
        num_query_groups=size.key_value_heads,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=size.n, normalization="RMSNorm"),
        vocab_size=size.V,
        max_sequence_length=size.S,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    gpt.to(terms.device)  # the norms are made on the CPU
    chunk = Float16Module(config, gpt) if config.bf16 else gpt
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, chunk)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=config.bf16, params_dtype=terms.dtype
        ),
        [model],
    )
    positions_BS = torch.arange(size.S, device=terms.device).expand(size.B, -1)
    square = torch.ones(1, 1, size.S, size.S, dtype=torch.bool, device=terms.device)
    causal_SS = square.triu(1)  # True: is not seen

    batches = terms.batches()

    def loss() -> Tensor:
        tokens_BS, labels_BS = next(batches)
        losses_BS: Tensor = model(tokens_BS, positions_BS, causal_SS, labels=labels_BS)
        return losses_BS.float().mean()

    return contender_of(NAME, model, loss, optimizer.step)
