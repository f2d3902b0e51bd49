"""Megatron-Core's GPTModel with our layers in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from moe_parallel.config import Config, ModelConfig
from moe_parallel.config.training import DENSE
from moe_parallel.experts.dense import DenseMLP, linear_by
from moe_parallel.experts.fp8 import Fp8Engine
from moe_parallel.layers import LayerContext
from moe_parallel.layers.dispatched import build_context
from moe_parallel.layers.expert_layer import at_start
from moe_parallel.layers.given_choices import RouterTrace
from moe_parallel.layers.system import system_of
from moe_parallel.model.attention_backends import CORE_ATTENTIONS
from moe_parallel.model.heads_norm import over
from moe_parallel.model.initialization import initialize_weights
from moe_parallel.model.language_model import Fp8GPTModel, LanguageModel
from moe_parallel.model.self_attention import RotarySelfAttention
from moe_parallel.model.token_ids import TransformerLayerWithIds
from moe_parallel.model.transformer_config import transformer_config
from moe_parallel.ops import Ops
from moe_parallel.parallel import Groups
from moe_parallel.platform.device import device
from moe_parallel.platform.norm import norm_by
from moe_parallel.systems.hash.rule import build_hash_table
from moe_parallel.telemetry.progress import Progress, Timers
from moe_parallel.telemetry.statistics import RoutingStatistics


def build_model(
    config: Config,
    padded_vocab_size: int,
    groups: Groups,
    statistics: RoutingStatistics,
    progress: Progress | None = None,
    iteration: Callable[[], int] = at_start,
    trace: RouterTrace | None = None,
    token_counts: Sequence[int] = (),
) -> list[GPTModel]:
    """This rank's chunks of the model: one, or one per virtual pipeline stage.

    Weights are initialized and are the same in every parallel layout. `progress` is told what the
    model does; `iteration` returns the number of optimizer steps so far; `trace` records the
    choices of the layers, or replays others; `token_counts` is how often each token id occurs in
    the training text, as far as that was counted.
    """
    chunks = build_chunks(
        config, padded_vocab_size, groups, statistics, progress, iteration, trace, token_counts
    )
    for chunk in chunks:
        initialize_weights(chunk, config.training.seed, config.model.init_method_std)
    return chunks


def build_chunks(
    config: Config,
    padded_vocab_size: int,
    groups: Groups,
    statistics: RoutingStatistics,
    progress: Progress | None = None,
    iteration: Callable[[], int] = at_start,
    trace: RouterTrace | None = None,
    token_counts: Sequence[int] = (),
    ops: Ops | None = None,
) -> list[GPTModel]:
    """The chunks of `build_model` before their weights have values.

    `ops`: the operators; None: those of --moe-backend.
    """
    config = replace(config, selection=config.selection.rescaled(config))
    megatron = transformer_config(config)
    progress = progress or Progress()
    megatron.timers = Timers(progress)
    hash_table_VK = build_hash_table(config, padded_vocab_size, token_counts)
    fp8 = None if config.fp8.fp8_format is None else Fp8Engine(config.fp8, groups.edp)
    context = build_context(
        config,
        groups,
        statistics,
        ops=ops,
        fp8=fp8,
        progress=progress,
        trace=trace or RouterTrace(),
        iteration=iteration,
        hash_table_VK=hash_table_VK,
    )
    gpt: Callable[..., GPTModel] = LanguageModel if fp8 is None else partial(Fp8GPTModel, fp8)
    stages: list[int | None] = [None]
    if config.virtual_stages is not None:
        stages = list(range(config.virtual_stages))
    chunks = [
        gpt(
            ops=context.ops,
            loss_chunk_size=config.training.tokens_of_loss_chunk(device().type),
            passes_token_ids=hash_table_VK is not None,
            config=megatron,
            transformer_layer_spec=_block_spec(config, megatron, context, stage),
            pre_process=groups.pp.rank() == 0 and stage == stages[0],
            post_process=groups.pp.rank() == groups.pp.size() - 1 and stage == stages[-1],
            vp_stage=stage,
            **_embeddings(config, padded_vocab_size),
        )
        for stage in stages
    ]
    if config.model.qk_layernorm_all_heads:
        # Otherwise Megatron-Core sums these norms' gradients over the tensor-parallel ranks, as if
        # each had the norm of a head. A norm over all heads is divided over them.
        megatron.qk_layernorm = False
    return chunks


def _embeddings(config: Config, padded_vocab_size: int) -> dict[str, Any]:
    """What the model is told of its tokens and their positions."""
    model = config.model
    return {
        "vocab_size": padded_vocab_size,
        "max_sequence_length": config.training.seq_length,
        "share_embeddings_and_output_weights": not model.untie_embeddings_and_output_weights,
        "position_embedding_type": "rope",
        "rotary_base": model.rotary_base,
        "rope_scaling": model.use_rope_scaling,
        "rope_scaling_factor": model.rope_scaling_factor,
    }


def _block_spec(
    config: Config, megatron: TransformerConfig, context: LayerContext, stage: int | None
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(megatron, stage)
    count = get_num_layers_to_build(megatron, stage)
    layers = [
        _layer_spec(
            config,
            context,
            _moe_spec(config, context) if is_moe else _dense_spec(config, context),
        )
        for is_moe in config.moe_layers[first : first + count]
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_by(context.ops))


def _layer_spec(config: Config, context: LayerContext, mlp: ModuleSpec) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if context.hash_table_VK is not None and mlp.module is not DenseMLP:
        spec.module = TransformerLayerWithIds
    attention = spec.submodules.self_attention
    attention.module = RotarySelfAttention
    attention.params = {**attention.params, "ops": context.ops}
    column, row = linear_by(context.ops)
    attention.submodules = replace(
        attention.submodules,
        linear_qkv=column,
        core_attention=CORE_ATTENTIONS[config.training.attention_backend],
        linear_proj=row,
        **_head_norms(config.model, context),
    )
    norm = norm_by(context.ops)
    spec.submodules = replace(
        spec.submodules, input_layernorm=norm, pre_mlp_layernorm=norm, mlp=mlp
    )
    return spec


def _head_norms(model: ModelConfig, context: LayerContext) -> dict[str, type[torch.nn.Module]]:
    """The norms of queries and keys; {}: there are none."""
    if not model.qk_layernorm:
        return {}
    if not model.qk_layernorm_all_heads:
        norm = norm_by(context.ops)
        return {"q_layernorm": norm, "k_layernorm": norm}
    return {
        "q_layernorm": over(model.num_attention_heads, context.groups.tp),
        "k_layernorm": over(model.query_groups, context.groups.tp),
    }


def _dense_spec(config: Config, context: LayerContext) -> ModuleSpec:
    column, row = linear_by(context.ops)
    return ModuleSpec(
        module=DenseMLP,
        submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row),
        params={
            "ops": context.ops,
            "tp_group": context.groups.tp,
            "recomputes": DENSE in config.training.recomputed_modules,
        },
    )


def _moe_spec(config: Config, context: LayerContext) -> ModuleSpec:
    system = system_of(config.selection)
    return ModuleSpec(
        module=system.layer.variant(config.selection),
        params=system.arguments(config.selection, config.expert_width, context),
    )
