"""Batches, length, precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_parallel.config.cuda_graph import check_cuda_graph
from moe_parallel.config.option import option
from moe_parallel.config.recompute import check_recompute, recomputed_modules
from moe_parallel.config.section import Section
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class TrainingConfig(Section):
    """Batches, length, precision."""

    micro_batch_size: int = option(
        4, "number of sequences per forward pass of one data-parallel rank", least=1
    )
    global_batch_size: int = option(16, "number of sequences per optimizer step", least=1)
    seq_length: int = option(256, "number of tokens per sequence", least=1)
    train_iters: int = option(100, "number of optimizer steps of the whole run", least=1)
    exit_interval: int | None = option(
        None, "save and exit at iterations divisible by this; none: train to the end", least=1
    )
    skip_train: bool = option(
        False, "evaluate the checkpoint of --load on held-out text and end; nothing is written"
    )
    exit_duration_in_mins: float | None = option(
        None,
        "save and exit, with code 75, before a step would end later than this many minutes after "
        "the start of the job; none: no limit",
        above=0,
    )
    seed: int = option(
        1234, "seed of initial weights, data order, input jitter and expert dropout", least=0
    )
    bf16: bool = option(False, "compute in bfloat16 with fp32 master weights")
    deterministic_mode: bool = option(
        False,
        "use only algorithms that give the same bits in every run, and refuse what has none",
    )
    gradient_accumulation_fusion: bool = option(
        False,
        "let the backward passes of experts, linear layers and the head add weight gradients "
        "directly to the fp32 sum over micro-batches, instead of rounding them and adding them "
        "afterward",
    )
    cuda_graph_impl: str | None = option(
        None,
        "full_iteration: on a GPU, record the forward and backward passes of a step once as a CUDA "
        "graph and replay it in each step, so that the host no longer launches kernel after "
        "kernel; none: launch them",
        choices=("full_iteration",),
    )
    cuda_graph_warmup_steps: int = option(
        3, "number of steps of a process before --cuda-graph-impl records one", least=1
    )
    attention_backend: str = option(
        "auto",
        "kernel of attention; auto: our own on a CPU with AVX-512 (Intel's in bf16: with AMX) "
        "or AMD's with AVX2, where a sequence or document is not divided by "
        "--context-parallel-size, and otherwise the kernel that torch selects, without S x S "
        "scores where it can; flash, fused (cuDNN), unfused: that kernel of torch, or an "
        "error; transformer_engine: its DotProductAttention, on a GPU in bf16; local: "
        "Megatron-Core's, which keeps S x S scores per head",
        choices=("auto", "flash", "fused", "unfused", "transformer_engine", "local"),
    )
    reset_attention_mask: bool = option(
        False,
        "a token attends only to tokens of its own document, not to all before it in the sequence; "
        "not for lory, lory_prefix, smear and segment_expert_choice",
    )
    reset_position_ids: bool = option(
        False,
        "positions begin at 0 in every document; as in Megatron, this changes no result with "
        "rotary embeddings, which are relative",
    )
    loss_chunk_size: int | None = option(
        None,
        "number of tokens whose logits exist at a time; none: 2048 on a GPU, 512 on a CPU; 0: all "
        "of a micro-batch, and the loss is Megatron-Core's",
        least=0,
    )
    recompute_granularity: str | None = option(
        None,
        "full: recompute the activations of every layer in the backward pass; selective: those of "
        "--recompute-modules; none: keep them",
        choices=("full", "selective"),
    )
    recompute_modules: tuple[str, ...] | None = option(
        None,
        "with --recompute-granularity selective: core_attn (attention after the projections), "
        "layernorm (the outputs of norms), mlp (dense layers), moe (layers of experts), "
        "shared_experts; none: core_attn",
    )

    @property
    def uses_cuda_graph(self) -> bool:
        return self.cuda_graph_impl is not None and not self.skip_train

    @property
    def without_graph(self) -> TrainingConfig:
        """The same, but every kernel is launched, on any device and in any layout."""
        steps = type(self).cuda_graph_warmup_steps
        return replace(self, cuda_graph_impl=None, cuda_graph_warmup_steps=steps)

    def tokens_of_loss_chunk(self, device_type: str) -> int:
        """--loss-chunk-size on a device of the type `cuda` or `cpu`."""
        if self.loss_chunk_size is not None:
            return self.loss_chunk_size
        # Fewer tokens are in the caches of a CPU; on a GPU their products would not fill it.
        return 2048 if device_type == "cuda" else 512

    @property
    def recomputed_modules(self) -> frozenset[str]:
        return recomputed_modules(self.recompute_granularity, self.recompute_modules)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.gradient_accumulation_fusion:
            _check_fusion(config)
        check_recompute(config)
        check_cuda_graph(config)
        if self.skip_train:
            _check_evaluation(config)
        if self.deterministic_mode and self.attention_backend == "fused":
            raise InputError(
                "--deterministic-mode: --attention-backend fused is cuDNN's kernel, whose backward "
                "pass is not deterministic: choose auto, flash, unfused, transformer_engine or "
                "local"
            )
        _check_batch(self, config, world_size)


def _check_fusion(config: Config) -> None:
    if config.fp8.fp8_format is not None:
        raise InputError(
            "--gradient-accumulation-fusion is for products of our own, and --fp8-format "
            f"{config.fp8.fp8_format} leaves those of experts to Transformer Engine: remove one of "
            "them"
        )


def _check_evaluation(config: Config) -> None:
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.load is None:
        raise InputError("--skip-train evaluates a checkpoint: set --load")
    if checkpoint.save is not None:
        raise InputError(f"--skip-train writes nothing: leave out --save {checkpoint.save}")
    if not logging.evaluates_at_the_end:
        raise InputError(
            f"--skip-train with --eval-iters {logging.eval_iters} leaves nothing to do: set it to "
            "at least 1, or set --full-evaluation"
        )


def _check_batch(training: TrainingConfig, config: Config, world_size: int) -> None:
    dp = config.parallel.data_parallel_size(world_size)
    step = training.micro_batch_size * dp
    if training.global_batch_size % step:
        raise InputError(
            f"--global-batch-size is {training.global_batch_size}, not a multiple of "
            f"--micro-batch-size {training.micro_batch_size} x {dp} data-parallel ranks: "
            f"choose a multiple of {step}"
        )
    pp = config.parallel.pipeline_model_parallel_size
    micro_batches = training.global_batch_size // step
    if config.parallel.num_layers_per_virtual_pipeline_stage and micro_batches % pp:
        raise InputError(
            f"--global-batch-size {training.global_batch_size} makes {micro_batches} "
            f"micro-batches, but virtual pipeline stages need a multiple of "
            f"--pipeline-model-parallel-size {pp}"
        )
