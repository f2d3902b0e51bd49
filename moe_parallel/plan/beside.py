"""A second model, planned in a layout of the first, to compare the two."""

from __future__ import annotations

from dataclasses import replace

from moe_parallel.config import Config
from moe_parallel.plan.layout import Layout


def in_layout(config: Config, layout: Layout) -> Config:
    """The configuration with the sizes of `layout`, which another configuration has.

    The number of virtual stages is the same, not the number of layers of each.
    """
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pp,
        num_layers_per_virtual_pipeline_stage=(
            None if layout.virtual == 1 else config.model.num_layers // layout.pp // layout.virtual
        ),
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        ddp_bucket_size=layout.bucket_size,
    )
    training = replace(
        config.training,
        micro_batch_size=layout.micro_batch,
        global_batch_size=layout.global_batch,
        recompute_granularity=layout.recompute_granularity,
        recompute_modules=layout.recompute_modules or None,
    )
    return replace(config, parallel=parallel, training=training)
