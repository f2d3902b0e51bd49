"""The options of the layout of a model over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import divides
from moe_parallel.config.option import Section, option
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class ParallelConfig(Section):
    """Sizes of Megatron-Core's process groups. The remaining factor is data parallelism."""

    tensor_model_parallel_size: int = option(
        1, "number of ranks that share every dense matrix (tp)", least=1
    )
    sequence_parallel: bool = option(
        False, "split activations along the sequence between tensor-parallel layers"
    )
    context_parallel_size: int = option(
        1, "number of ranks that share the tokens of every sequence (cp)", least=1
    )
    pipeline_model_parallel_size: int = option(
        1, "number of pipeline stages that share the layers (pp)", least=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "number of layers per virtual stage of the interleaved schedule; none: one stage per rank",
        least=1,
    )
    expert_model_parallel_size: int = option(
        1, "number of ranks that share the experts (ep)", least=1
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        "number of ranks that share the matrices of each expert (etp); none: as for dense "
        "matrices (tp)",
        least=1,
    )
    moe_dispatch_parts: int = option(
        1,
        "divide the experts of each rank into this many parts; on GPUs the tokens of a part travel "
        "while another part computes; 1: send all tokens at once",
        least=1,
    )
    use_distributed_optimizer: bool = option(
        False, "shard the optimizer state over data-parallel ranks"
    )
    overlap_grad_reduce: bool = option(
        False, "reduce the gradients of a bucket of weights while the backward pass goes on"
    )
    overlap_param_gather: bool = option(
        False,
        "with --use-distributed-optimizer: gather updated weights while the forward pass begins",
    )
    ddp_bucket_size: int | None = option(
        None,
        "least number of weights whose gradients are reduced at a time with --overlap-grad-reduce; "
        "none: 40 million, or a million per data-parallel rank if that is more",
        least=1,
    )
    distributed_backend: str | None = option(
        None,
        "communication backend; none: nccl if there is a GPU, otherwise gloo",
        choices=("gloo", "nccl"),
    )
    distributed_timeout_minutes: float = option(
        10.0, "end the job if a collective waits longer than this", above=0, most=1_000_000
    )
    hang_timeout: float | None = option(
        300.0,
        "if no rank makes progress for this many seconds, the job names the rank that hangs and "
        "ends with code 76; none: never",
        above=0,
        most=1_000_000,
    )

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """The number of data-parallel ranks: those left by the other parallelisms."""
        return world_size // (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
        )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        _check_layout(self, config, world_size)
        _check_sequence(self, config)
        _check_pipeline(self, config)
        _check_overlap(self)
        _check_parts(self, config)


def _check_layout(parallel: ParallelConfig, config: Config, world_size: int) -> None:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    cp = parallel.context_parallel_size
    if world_size % (tp * cp * pp):
        of_cp = f"--context-parallel-size {cp} x " if cp > 1 else ""
        raise InputError(
            f"{world_size} ranks cannot be divided into --tensor-model-parallel-size {tp} x "
            f"{of_cp}--pipeline-model-parallel-size {pp}: start a multiple of {tp * cp * pp} ranks "
            "(--nproc-per-node) or change the sizes"
        )
    if world_size % (etp * ep * pp):
        raise InputError(
            f"{world_size} ranks cannot be divided into --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {ep} x --pipeline-model-parallel-size {pp}: start a "
            f"multiple of {etp * ep * pp} ranks (--nproc-per-node) or change the sizes"
        )
    if parallel.sequence_parallel and tp == 1:
        raise InputError(
            "--sequence-parallel splits activations over tensor-parallel ranks, but "
            "--tensor-model-parallel-size is 1: raise it or leave the flag out"
        )


def _check_sequence(parallel: ParallelConfig, config: Config) -> None:
    """The rules on the parts into which ranks divide a sequence."""
    length, tp = config.training.seq_length, parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    if tp > 1:
        divides(length, "seq_length", tp, "tensor_model_parallel_size")
    if cp == 1:
        return
    if length % (2 * cp) or length % (cp * tp):
        multiple = math.lcm(2 * cp, cp * tp)
        by_tp = f", and --tensor-model-parallel-size {tp} divides those of a rank" if tp > 1 else ""
        raise InputError(
            f"--seq-length is {length}. --context-parallel-size {cp} divides a sequence into "
            f"{2 * cp} chunks{by_tp}: choose a multiple of {multiple}"
        )
    backend = config.training.attention_backend
    if backend in ("local", "transformer_engine"):
        raise InputError(
            f"--attention-backend is {backend}, which gets whole sequences here, and "
            f"--context-parallel-size is {cp}: choose auto, flash, fused or unfused"
        )


def _check_overlap(parallel: ParallelConfig) -> None:
    gathers, reduces = parallel.overlap_param_gather, parallel.overlap_grad_reduce
    if gathers and not parallel.use_distributed_optimizer:
        raise InputError(
            "--overlap-param-gather gathers what the ranks of a sharded optimizer have updated: "
            "add --use-distributed-optimizer or leave the flag out"
        )
    if gathers and not reduces:
        raise InputError(
            "--overlap-param-gather works bucket by bucket, as --overlap-grad-reduce does: add "
            "that flag or leave this one out"
        )
    if parallel.ddp_bucket_size is not None and not reduces:
        raise InputError(
            f"--ddp-bucket-size is {parallel.ddp_bucket_size}, but without --overlap-grad-reduce "
            "all gradients are one bucket: add that flag or leave this one out"
        )


def _check_parts(parallel: ParallelConfig, config: Config) -> None:
    parts, ep = parallel.moe_dispatch_parts, parallel.expert_model_parallel_size
    if parts == 1:
        return
    if config.moe.num_experts is None:
        raise InputError(
            f"--moe-dispatch-parts is {parts}, but the model is dense: set --num-experts, or leave "
            "the parts out"
        )
    if ep == 1 and parallel.expert_tensor_size == 1:
        raise InputError(
            f"--moe-dispatch-parts is {parts}, but --expert-model-parallel-size is 1, so no token "
            "is sent to another rank: raise it or leave the parts out"
        )
    if config.selection.merges:
        raise InputError(
            f"--moe-dispatch-parts is {parts}, but --expert-selection {config.selection.system} "
            "merges its experts and sends no tokens: leave the parts out"
        )
    experts = config.num_experts // ep
    if experts % parts:
        raise InputError(
            f"--moe-dispatch-parts is {parts}, which does not divide the {experts} experts of a "
            f"rank (--num-experts {config.num_experts} / --expert-model-parallel-size {ep}): "
            "choose a divisor"
        )


def _check_pipeline(parallel: ParallelConfig, config: Config) -> None:
    layers = config.model.num_layers
    pp = parallel.pipeline_model_parallel_size
    divides(layers, "num_layers", pp, "pipeline_model_parallel_size")
    virtual = parallel.num_layers_per_virtual_pipeline_stage
    if virtual is None:
        return
    if pp == 1:
        raise InputError(
            f"--num-layers-per-virtual-pipeline-stage is {virtual}, but "
            "--pipeline-model-parallel-size is 1: raise it or leave the flag out"
        )
    if (layers // pp) % virtual or layers // pp == virtual:
        raise InputError(
            f"--num-layers-per-virtual-pipeline-stage is {virtual}: it must divide the "
            f"{layers // pp} layers of a pipeline rank into two stages or more"
        )
