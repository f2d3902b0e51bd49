"""How a model is laid out, trained, fed, saved and watched."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.option import option


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of Megatron-Core's process groups; data parallelism takes the ranks that are left."""

    tensor_model_parallel_size: int = option(1, "ranks that share every dense matrix (tp)")
    sequence_parallel: bool = option(
        False, "split activations along the sequence between tensor-parallel layers"
    )
    pipeline_model_parallel_size: int = option(1, "stages that share the layers (pp)")
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "layers in one virtual stage of the interleaved schedule; none: one stage per rank"
    )
    expert_model_parallel_size: int = option(1, "ranks that share the experts (ep)")
    expert_tensor_parallel_size: int | None = option(
        None, "ranks that share each expert's matrices (etp); none: as dense matrices (tp)"
    )
    use_distributed_optimizer: bool = option(
        False, "shard optimizer state over data-parallel ranks"
    )
    distributed_backend: str | None = option(
        None, "none: nccl where there is a GPU, else gloo", choices=("gloo", "nccl")
    )
    distributed_timeout_minutes: float = option(
        10.0, "a collective that waits longer than this ends the job"
    )

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length, precision."""

    micro_batch_size: int = option(4, "sequences in one forward pass of one data-parallel rank")
    global_batch_size: int = option(16, "sequences in one optimizer step")
    seq_length: int = option(256, "tokens in a sequence")
    train_iters: int = option(100, "optimizer steps of the whole run")
    exit_interval: int | None = option(
        None, "save and stop cleanly at iterations divisible by this"
    )
    seed: int = option(1234, "of initial weights, data order and dropout")
    bf16: bool = option(False, "compute in bfloat16 with fp32 master weights")
    gradient_accumulation_fusion: bool = option(
        False,
        "the kernels of experts add weight gradients to the sum over micro-batches (fp32), instead "
        "of making a gradient that is rounded and then added",
    )
    recompute_granularity: str | None = option(
        None, "full: recompute every layer's activations in the backward pass", choices=("full",)
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and Megatron-Core's learning-rate schedule."""

    lr: float = option(3e-4, "peak learning rate")
    min_lr: float = option(3e-5, "learning rate at the end of the decay")
    lr_warmup_iters: int = option(10, "iterations of linear warm-up from 0")
    lr_decay_iters: int | None = option(
        None, "iterations until --min-lr is reached; none: --train-iters"
    )
    lr_decay_style: str = option(
        "cosine",
        "shape of the decay (WSD: warm-up, stable, decay)",
        choices=("cosine", "linear", "constant", "WSD"),
    )
    lr_wsd_decay_iters: int | None = option(
        None, "WSD: iterations of the final decay; none: a tenth of the decay iterations"
    )
    weight_decay: float = option(0.1, "decoupled weight decay; norm weights are exempt")
    adam_beta1: float = option(0.9, "decay of Adam's first moment")
    adam_beta2: float = option(0.95, "decay of Adam's second moment")
    adam_eps: float = option(1e-8, "Adam's epsilon")
    clip_grad: float = option(1.0, "clip the global gradient norm to this; 0: off")


@dataclass(frozen=True)
class DataConfig:
    """What the model reads. Without --data-path: the text that every Python carries."""

    data_path: tuple[str, ...] | None = option(
        None,
        "indexed datasets (prefix of .bin/.idx) in Megatron's blend syntax: one prefix, or "
        "weight prefix weight prefix ...; none: the embedded corpus",
    )
    split: str = option("969,30,1", "parts of --data-path for training, validation and test")
    tokenizer_type: str = option(
        "ByteLevelBPE", "ByteLevelBPE, HuggingFaceTokenizer or SentencePieceTokenizer"
    )
    tokenizer_model: str | None = option(
        None, "file, folder or hub name of the tokenizer; none: train one on the embedded corpus"
    )
    vocab_size: int | None = option(
        None, "tokens of the vocabulary; none: the tokenizer's (4096 for the embedded corpus)"
    )
    data_cache_path: str = option(
        "runs/corpus", "where the embedded corpus and dataset indices are built, once"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is written, and from where training goes on."""

    save: str | None = option(
        None, "folder of the run: checkpoints, metrics, figure; none: nothing is written"
    )
    load: str | None = option(
        None,
        "folder of a run, or one of its iter_* folders, to go on from. Without --config its own "
        "configuration is the file; then --save is its folder unless given. Where --save names the "
        "same folder and no checkpoint is there yet, the run begins",
    )
    finetune: bool = option(
        False,
        "--load gives the weights alone: iteration, data, optimizer state, schedule and random "
        "states start anew, as a run of their own in another --save",
    )
    override_opt_param_scheduler: bool = option(
        False,
        "go on from --load with the schedule configured here (learning rates, warm-up, decay, "
        "weight decay) in place of the one that it was saved with, which is refused otherwise",
    )
    save_interval: int | None = option(
        None, "iterations between checkpoints; none: at the end and on a signal only"
    )
    keep_last: int | None = option(None, "checkpoints to keep, the newest; none: all")


@dataclass(frozen=True)
class LoggingConfig:
    """What is measured and shown while training runs."""

    log_interval: int = option(10, "iterations between logged lines")
    eval_interval: int | None = option(
        None, "iterations between evaluations; none: at the end only"
    )
    eval_iters: int = option(
        10,
        "global batches of each domain in one evaluation; 0: no evaluation, but for that of "
        "--full-evaluation",
    )
    eval_first_part: int | None = option(
        None,
        "evaluations also give the loss without the first N tokens of each sequence; none: without "
        "the first segment, where whole segments are routed",
    )
    full_evaluation: bool = option(
        False, "at the end, evaluate every held-out token and compare with byte models and xz"
    )
    tensorboard: bool = option(True, "write TensorBoard event files under --save")
    wandb_project: str | None = option(
        None, "log to this Weights & Biases project (pip install wandb)"
    )
    wandb_mode: str = option("offline", "of Weights & Biases", choices=("offline", "online"))

    @property
    def evaluates_at_the_end(self) -> bool:
        return self.full_evaluation or self.eval_iters > 0
