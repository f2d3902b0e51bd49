"""Megatron-Core's own mixture-of-experts GPT in any layout, for the tests of the platform.

It contains none of our own layers, except the norm that supports sequence parallelism.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from moe_parallel.platform.norm import RMSNorm
from tests.platform.layout import Layout

EXPERTS, LAYERS, SEQUENCE, VOCABULARY, WIDTH = 4, 4, 16, 64, 32
MICRO_BATCHES = 4


@dataclass
class Trained:
    """A model in training: everything that a step needs."""

    layout: Layout
    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer


def build(layout: Layout) -> Trained:
    """Create the groups, the model and its optimizer on this rank."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(1)
    init_num_microbatches_calculator(
        dist.get_rank(), None, 2 * MICRO_BATCHES, 2, parallel_state.get_data_parallel_world_size()
    )
    config = _config(layout)
    stages = range(layout.vpp) if layout.vpp else [None]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=layout.distributed_optimizer
    )
    chunks = [DistributedDataParallel(config, ddp_config, _gpt(config, layout, s)) for s in stages]
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            bf16=layout.bf16,
            use_distributed_optimizer=layout.distributed_optimizer,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if layout.vpp else no_sync[0]
    return Trained(layout, config, chunks, optimizer)


def step(trained: Trained) -> list[tuple[float, float]]:
    """One step, always on the same batch: (loss, gradient norm), as from `forward_backward`."""
    trained.optimizer.zero_grad()
    for chunk in trained.chunks:
        chunk.zero_grad_buffer()
    losses = forward_backward(trained)
    succeeded, norm, _ = trained.optimizer.step()
    assert succeeded and 0 < norm < 100, (succeeded, norm)
    return [(loss, norm) for loss in losses]


def forward_backward(trained: Trained, forward_only: bool = False) -> list[float]:
    """The mean loss of all micro-batches as the only item; empty before the last stage."""
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in trained.chunks],
        model=trained.chunks,
        num_microbatches=get_num_microbatches(),
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=forward_only,
    )
    if not reported:
        return []
    loss = torch.stack([entry["loss"] for entry in reported]).mean()
    dist.all_reduce(loss, dist.ReduceOp.AVG, parallel_state.get_data_parallel_group())
    return [loss.item()]


def batches() -> Iterator[torch.Tensor]:
    """This data-parallel rank's share of the micro-batches of a step: ascending numbers."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCABULARY, (MICRO_BATCHES, 2, 1), generator=generator)
    rank, size = _data_parallel()
    yield from (starts[rank::size] + torch.arange(SEQUENCE + 1)) % VOCABULARY


def _data_parallel() -> tuple[int, int]:
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])

    def mean(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule scales `loss` in place

    return losses, mean


def _config(layout: Layout) -> TransformerConfig:
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        ffn_hidden_size=2 * WIDTH,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=layout.dropout,
        attention_dropout=layout.dropout,
        bf16=layout.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Between two stages that are each other's next and previous stage, the messages of a batch
        # could not be distinguished.
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        **{f"recompute_{k}": v for k, v in recompute.items() if layout.recompute},
    )


def _gpt(config: TransformerConfig, layout: Layout, vp_stage: int | None) -> torch.nn.Module:
    layer = get_gpt_layer_local_spec(num_experts=EXPERTS, normalization="RMSNorm")
    norms = {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}
    layer.submodules = replace(layer.submodules, **norms)
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        config,
        _block(config, layer, vp_stage),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=layout.tied,
        vp_stage=vp_stage,
    )
    return Float16Module(config, model) if layout.bf16 else model


def _block(config, layer, vp_stage):
    """The layers of this stage and the norm after the last: the only place to select that norm."""
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
