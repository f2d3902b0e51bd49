"""Megatron-Core's own GPTModel, its checkpoints as Megatron-LM saves them, and what it computes."""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from moe_parallel.training.checkpoint.index import read_index, tensor_entries
from moe_parallel.training.checkpoint.tensors import sharded_values, whole_tensor

ROWS, LENGTH = 64, 12
TOKENS = torch.arange(2 * LENGTH).mul(7).remainder(ROWS).view(2, LENGTH)

#: Megatron-LM's arguments for each model. All occur: tied and untied, grouped queries, norms and
#: biases of queries, both scores, groups, a balancing bias, shared experts, dense layers too.
_DENSE = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "rotary_base": 5000,
    "rotary_percent": 1.0,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
    "init_method_std": 0.1,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "num_experts": None,
    "moe_layer_freq": 1,
}
_MOE = _DENSE | {
    "untie_embeddings_and_output_weights": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "dense_qkv": _DENSE | {"add_qkv_bias": True, "qk_layernorm": True},
    "mixtral": _MOE,
    "pre_softmax": _MOE
    | {
        "group_query_attention": False,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "global_aux_loss",  # with a state of its own here
    },
    "deepseek": _MOE
    | {
        "moe_layer_freq": [0, 1, 1, 1],
        "num_experts": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "qwen2_moe": _MOE
    | {
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
    },
}


@dataclass(frozen=True)
class Layout:
    """Sizes of parallel groups, and how tensors are stored."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    metadata: str | None = None  # the flag of sharded_state_dict that is set
    is_te: bool = False  # by the names of Transformer Engine's spec
    is_grouped: bool = False  # the experts are GroupedMLP, which only 0.16 has


def build(name: str, layout: Layout = Layout()) -> GPTModel:
    """This rank's part of a model in evaluation mode, with the same weights in every layout.

    Call `parallel_state.destroy_model_parallel()` afterward.
    """
    arguments = ARGUMENTS[name]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)
    known = {each.name for each in fields(TransformerConfig)}
    given = {key: value for key, value in arguments.items() if key in known}
    if not arguments["group_query_attention"]:
        given["num_query_groups"] = None
    config = TransformerConfig(
        **given,
        num_moe_experts=arguments["num_experts"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **(
            {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
            if layout.is_grouped
            else {}
        ),
    )
    if arguments["num_experts"] is None:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    model = GPTModel(
        config,
        spec,
        vocab_size=ROWS,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        rotary_base=arguments["rotary_base"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
    )
    if not layout.is_grouped:  # what it saves are copies of its weights
        _fill(model)
    return model.eval()


@torch.no_grad()
def _fill(model: GPTModel) -> None:
    for tensor in sharded_values(_sharded(model, "non_homogeneous_layers")):
        if isinstance(tensor, ShardedTensor):
            generator = torch.Generator().manual_seed(zlib.crc32(tensor.key.encode()))
            whole = torch.randn(tensor.global_shape, generator=generator) * 0.1
            if "norm" in tensor.key:
                whole += 1
            sizes = (1,) * tensor.prepend_axis_num + tuple(tensor.data.shape)
            for axis, (first, size) in enumerate(zip(tensor.global_offset, sizes, strict=True)):
                whole = whole.narrow(axis, first, size)
            tensor.data.copy_(whole.reshape(tensor.data.shape))


def _sharded(model: GPTModel, flag: str | None) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    flags = {} if flag is None else {flag: True}
    state: dict[str, Any] = model.sharded_state_dict(metadata=flags | {"dp_cp_group": group})
    return state


def _state(model: GPTModel, layout: Layout) -> dict[str, Any]:
    """The sharded state dict, by the names of the layout's spec."""
    state = _sharded(model, layout.metadata)
    if layout.is_te:
        for value in list(state.values()):
            if value.key.endswith("mlp.linear_fc1.layer_norm_weight") and _is_moe(model, value):
                value.key = value.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
                _add_state(state, value)
            elif "layernorm.weight" in value.key:  # of queries, keys, and the last one
                _add_state(state, value)
    return state


def _is_moe(model: GPTModel, value: ShardedTensor) -> bool:
    frequency = model.config.moe_layer_freq
    if model.config.num_moe_experts is None:
        return False
    return frequency == 1 or bool(frequency[int(value.key.split(".")[2])])


def _add_state(state: dict[str, Any], norm: ShardedTensor) -> None:
    """The state of a norm of Transformer Engine."""
    axes = norm.prepend_axis_num
    shape, offset = tuple(norm.global_shape[:axes]), tuple(norm.global_offset[:axes])
    key = norm.key.replace("weight", "_extra_state")
    state[f"{key} {offset}"] = ShardedObject(
        key, None, shape or (1,), offset or (0,), norm.replica_id
    )


def save(
    name: str, folder: Path, layout: Layout = Layout(), start: Path | None = None
) -> torch.Tensor | None:
    """Save a model as Megatron-LM does, in `folder`; returns its logits [B, S, V] on one rank.

    `start`: a checkpoint with its weights; None: `build` gives them.
    """
    model = build(name, layout)
    if start is not None:
        _load(model, start, layout)
    arguments = Namespace(
        **ARGUMENTS[name],
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        params_dtype=torch.float32,
        attention_backend=AttnBackend.auto,
        adam_betas=(0.9, 0.95),
        data_path=["1.0", "text"],
        padded_vocab_size=ROWS,
    )
    content = {
        "model": _state(model, layout),
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 3,
    }
    checkpoint = folder / "iter_0000003"
    if dist.get_rank() == 0:
        checkpoint.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("3")
    dist.barrier()
    dist_checkpointing.save(
        content, str(checkpoint), content_metadata={"singleton_local_shards": False}
    )
    logits = None
    if dist.get_world_size() == 1 and not layout.is_grouped:  # those compute in bf16 only
        with torch.no_grad():
            logits = model(TOKENS, torch.arange(LENGTH).expand(2, -1), None)
    parallel_state.destroy_model_parallel()
    return logits


def differences(name: str, checkpoint: Path, layout: Layout = Layout()) -> list[str]:
    """Load a checkpoint by Megatron-Core; returns the tensors of this rank with other values."""
    model = build(name, layout)
    wanted = {key: value.clone() for key, value in _tensors(model)}
    with torch.no_grad():
        for _, tensor in _tensors(model):
            tensor.zero_()
    _load(model, checkpoint, layout)
    parallel_state.destroy_model_parallel()
    return [key for key, value in _tensors(model) if not torch.equal(value, wanted[key])]


def _load(model: GPTModel, checkpoint: Path, layout: Layout) -> None:
    loaded = dist_checkpointing.load({"model": _state(model, layout)}, str(checkpoint))
    model.load_state_dict(loaded["model"], strict=False)


def _tensors(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from ((key, each) for key, each in model.named_buffers() if "expert_bias" in key)


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of ours, by their keys."""
    index = read_index(checkpoint)
    return {key: whole_tensor(index, key, checkpoint) for key in tensor_entries(index)}
