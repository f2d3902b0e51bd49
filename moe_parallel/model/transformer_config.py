"""The configuration of this project, converted to Megatron-Core's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.random import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.config import Config
from moe_parallel.config.training import CORE_ATTENTION, NORM
from moe_parallel.errors import InputError


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def transformer_config(config: Config) -> TransformerConfig:
    """The TransformerConfig of a run.

    Megatron-Core's own MoE options stay at their defaults. It only needs to know that there are
    experts, so that its pipeline schedules scale auxiliary losses. Fusions that need CUDA are off.
    """
    model, parallel = config.model, config.parallel
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_width,
        qk_layernorm=model.qk_layernorm,
        add_qkv_bias=model.add_qkv_bias,
        ffn_hidden_size=model.ffn_hidden_size,
        layernorm_epsilon=model.norm_epsilon,
        init_method_std=model.init_method_std,  # only for sizes that follow from it
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # `initialization` fills the weights, the same in every layout. Megatron-Core's own pass
        # stays on, because it also marks the weights that tensor parallelism splits.
        init_method=_leave,
        output_layer_init_method=_leave,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_stages,
        # With two pipeline ranks, each is the other's next and previous rank. Only the overlapping
        # exchange separates the two directions of the interleaved schedule.
        overlap_p2p_comm=config.virtual_stages is not None,
        batch_p2p_comm=config.virtual_stages is None,
        # The stream waits for an exchange. By default the host waits for the device too, because
        # of a race that torch fixed in 1.13 (pytorch/pytorch#82450).
        batch_p2p_sync=False,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=config.training.bf16,
        deterministic_mode=config.training.deterministic_mode,
        hetereogenous_dist_checkpoint=True,  # one key per layer, even if all layers are alike
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **_experts(config),
        **_recomputation(config),
    )


def _recomputation(config: Config) -> dict[str, Any]:
    """What Megatron-Core computes again. The other modules of a layer are our own."""
    if config.training.recompute_granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    modules = config.training.recomputed_modules & {CORE_ATTENTION, NORM}
    if NORM in modules and torch.cuda.is_available() and not HAVE_TE:
        raise InputError(
            f"--recompute-modules {NORM}: on a GPU Megatron-Core's recomputation of norms needs "
            "Transformer Engine: pip install --no-build-isolation -e '.[gpu]', or leave it out"
        )
    if not modules:
        return {}
    return {"recompute_granularity": "selective", "recompute_modules": sorted(modules)}


def _experts(config: Config) -> dict[str, Any]:
    if config.moe.num_experts is None:
        return {}
    return {
        "num_moe_experts": config.moe.num_experts,
        "moe_ffn_hidden_size": config.expert_width,
        "expert_model_parallel_size": config.parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.parallel.expert_tensor_size,
    }
