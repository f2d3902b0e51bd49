"""Megatron-Core's own mixture-of-experts GPT, for the tests of the platform.

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
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from moe_parallel.platform.norm import RMSNorm

EXPERTS, LAYERS, SEQUENCE, VOCABULARY, WIDTH = 4, 4, 16, 64, 32
MICRO_BATCHES = 4


@dataclass
class Trained:
    """A model in training: everything that a step needs."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer


def build(
    pp: int = 1, ep: int = 1, *, tied: bool = False, distributed_optimizer: bool = False
) -> Trained:
    """Create the groups, the model and its optimizer on this rank. `tied`: its embeddings."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
    )
    model_parallel_cuda_manual_seed(1)
    init_num_microbatches_calculator(
        dist.get_rank(), None, 2 * MICRO_BATCHES, 2, parallel_state.get_data_parallel_world_size()
    )
    config = _config(pp, ep)
    sharded = {"use_distributed_optimizer": distributed_optimizer}
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **sharded)
    model = DistributedDataParallel(config, ddp_config, _gpt(config, tied))
    model.broadcast_params()
    optimizer_config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, **sharded)
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    return Trained(model, optimizer)


def step(trained: Trained) -> list[tuple[float, float]]:
    """One step, always on the same batch: (loss, gradient norm), as from `forward_backward`."""
    trained.optimizer.zero_grad()
    trained.model.zero_grad_buffer()
    losses = forward_backward(trained)
    succeeded, norm, _ = trained.optimizer.step()
    assert succeeded and 0 < norm < 100, (succeeded, norm)
    return [(loss, norm) for loss in losses]


def forward_backward(trained: Trained, forward_only: bool = False) -> list[float]:
    """The mean loss of all micro-batches as the only item; empty before the last stage."""
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches()],
        model=[trained.model],
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


def _config(pp: int, ep: int) -> TransformerConfig:
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
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
    )


def _gpt(config: TransformerConfig, tied: bool) -> torch.nn.Module:
    layer = get_gpt_layer_local_spec(num_experts=EXPERTS, normalization="RMSNorm")
    norms = {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}
    layer.submodules = replace(layer.submodules, **norms)
    # The layers of this stage and the norm after the last: the only place to select that norm.
    layers = [layer] * get_num_layers_to_build(config)
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
    )
