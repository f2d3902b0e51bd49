"""Batches, length, precision; what is recomputed or recorded as a CUDA graph; the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from moe_parallel.config.message import flag, shown
from moe_parallel.config.option import Section, option
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


CORE_ATTENTION, NORM, DENSE, EXPERTS, SHARED = (
    "core_attn", "layernorm", "mlp", "moe", "shared_experts",
)  # fmt: skip
MODULES = (CORE_ATTENTION, NORM, DENSE, EXPERTS, SHARED)

#: Modules of Megatron-Core that these layers do not have, and why.
_NOT_HERE = {
    "moe_act": "the experts never keep their activation, so there is nothing to recompute",
    "mla_up_proj": "this model has no latent attention",
}


def recomputed_modules(granularity: str | None, modules: tuple[str, ...] | None) -> frozenset[str]:
    """The modules that are computed again one by one; none with another granularity."""
    if granularity != "selective":
        return frozenset()
    return frozenset((CORE_ATTENTION,) if modules is None else modules)


def check_recompute(config: Config) -> None:
    """Raise InputError for a module that the model does not have or that is recomputed anyway."""
    granularity, modules = config.training.recompute_granularity, config.training.recompute_modules
    if modules is None:
        return
    told = f"--recompute-modules {' '.join(modules)}"
    if granularity != "selective":
        raise InputError(
            f"{told} is for --recompute-granularity selective, which is {granularity or 'none'}: "
            "set it to selective or leave the modules out"
        )
    for module in modules:
        if module in _NOT_HERE:
            raise InputError(f"--recompute-modules {module}: {_NOT_HERE[module]}; leave it out")
        if module not in MODULES:
            raise InputError(
                f"--recompute-modules {shown(module)} is unknown: choose from {', '.join(MODULES)}"
            )
    layers, selection = config.moe_layers, config.selection
    for module, is_wrong, reason in (
        (DENSE, all(layers), " is for dense layers, and all have experts; leave it out"),
        (EXPERTS, not any(layers), " is for experts, and the model is dense; leave it out"),
        (
            SHARED,
            selection.shared_expert is None or not any(layers),
            ": there is no shared expert; set --moe-shared-expert-intermediate-size or leave it "
            "out",
        ),
        (
            SHARED,
            getattr(selection, "moe_shared_expert_overlap", False),
            " cannot run during the dispatch as --moe-shared-expert-overlap does; leave one of "
            "them out",
        ),
        (SHARED, EXPERTS in modules, f": {EXPERTS} recomputes shared experts, too; leave one out"),
    ):
        if module in modules and is_wrong:
            raise InputError(f"--recompute-modules {module}{reason}")


_MODEL_PARALLEL = (
    "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip

#: Options of systems with which the host takes part in each step.
_OF_THE_HOST = {
    "moe_router_trace": "the choices of each step are written to a file",
    "moe_router_replay": "the choices of each step are read from a file",
    "moe_erc_loss_coeff": "a generator of random numbers is seeded in each step",
    "moe_input_jitter_eps": "the state of random numbers is set in each step",
    "smear_expert_dropout": "the state of random numbers is set in each step",
}


def check_cuda_graph(config: Config) -> None:
    """Raise InputError for an option with which a step cannot be recorded as a CUDA graph."""
    training = config.training
    if training.cuda_graph_impl is None:
        if training.cuda_graph_warmup_steps != type(training).cuda_graph_warmup_steps:
            raise InputError(
                f"{_told(training, 'cuda_graph_warmup_steps')}, but no step is recorded: set "
                "--cuda-graph-impl, or leave it out"
            )
        return
    if training.skip_train:  # which records nothing
        return
    for set_to, reason in _obstacles(config):
        raise InputError(
            f"--cuda-graph-impl {training.cuda_graph_impl} is not for {set_to}: {reason}; "
            "leave one of them out"
        )


def _obstacles(config: Config) -> Iterator[tuple[str, str]]:
    """The options in the way, as flags with their values, and why."""
    training, selection, moe = config.training, config.selection, config.moe
    for name in _MODEL_PARALLEL:
        if (getattr(config.parallel, name) or 1) > 1:
            yield _told(config.parallel, name), "each GPU must hold all layers and whole matrices"
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(config.parallel, name):
            yield _told(config.parallel, name), "the host starts these exchanges in each step"
    if training.recompute_granularity is not None:
        reason = "Megatron-Core reads the state of random numbers in each step"
        yield _told(training, "recompute_granularity"), reason
    if training.attention_backend in ("local", "transformer_engine"):
        reason = "it takes numbers from the host, or sets the state of random numbers, in each step"
        yield _told(training, "attention_backend"), reason
    if training.reset_attention_mask:
        yield _told(training, "reset_attention_mask"), "the host reads where documents begin"
    if config.fp8.fp8_format is not None:
        reason = "Transformer Engine takes the numbers of rows from the host"
        yield _told(config.fp8, "fp8_format"), reason
    if not any(config.moe_layers):
        return
    if config.parallel.moe_dispatch_parts > 1:
        reason = "streams beside the recorded one have not been tried"
        yield _told(config.parallel, "moe_dispatch_parts"), reason
    drops = moe.moe_expert_capacity_factor is not None and not moe.moe_pad_expert_input_to_capacity
    rows_vary = selection.choices_per_token is None or selection.free_experts or drops
    if moe.moe_activation_budget is not None and rows_vary and not selection.merges:
        reason = "the host divides a number of rows that varies among parts"
        yield _told(moe, "moe_activation_budget"), reason
    if moe.moe_backend == "reference" and not selection.merges:
        yield _told(moe, "moe_backend"), "the host reads the number of rows of each expert"
    for name, reason in _OF_THE_HOST.items():
        if getattr(selection, name, None):
            yield _told(selection, name), reason
    if selection.forced_routing is not None:
        yield "forced routing", "the host chooses the experts"


def _told(section: Any, name: str) -> str:
    value = getattr(section, name)
    return f"{flag(name)} {value if isinstance(value, str) else shown(value)}"


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW or Muon, and Megatron-Core's learning-rate schedule."""

    optimizer: str = option(
        "adam",
        "adam: AdamW. muon: Megatron-Core's Muon for weights of two axes or more, each expert's "
        "matrix by itself; AdamW for norms, biases, embedding and output layer",
        choices=("adam", "muon"),
        state=True,
    )
    lr: float = option(3e-4, "peak learning rate", least=0, most=1_000)
    min_lr: float = option(3e-5, "learning rate at the end of the decay", least=0)
    lr_warmup_iters: int = option(10, "number of iterations of linear warm-up from 0", least=0)
    lr_decay_iters: int | None = option(
        None, "iteration at which --min-lr is reached; none: --train-iters", least=1
    )
    lr_decay_style: str = option(
        "cosine",
        "shape of the decay (WSD: warm-up, stable, decay)",
        choices=("cosine", "linear", "constant", "WSD"),
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "WSD: number of iterations of the final decay; none: a tenth of the decay iterations",
        least=1,
    )
    weight_decay: float = option(
        0.1,
        "decoupled weight decay. As in Megatron-LM, weights of one axis are exempt: norms, the "
        "biases of attention, the b of routing_free and the scores of AoE's free experts. All "
        "others decay, also embedding, output layer, router and W_down",
        least=0,
    )
    adam_beta1: float = option(0.9, "decay rate of Adam's first moment", least=0, below=1)
    adam_beta2: float = option(0.95, "decay rate of Adam's second moment", least=0, below=1)
    adam_eps: float = option(1e-8, "Adam's epsilon", above=0)
    muon_momentum: float = option(0.9, "Muon's momentum", least=0, below=1)
    muon_nesterov: bool = option(False, "Nesterov's momentum in Muon")
    muon_scale_mode: str = option(
        "spectral",
        "the scale of Muon's update U V^T of a matrix: spectral, sqrt(max(out, in)); "
        "unit_rms_norm, sqrt(out / in); shape_scaling, sqrt(max(1, out / in))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = option(
        1.0,
        "a factor of all Muon's updates; with spectral, 0.2 gives them about the size of AdamW's",
        above=0,
    )
    muon_num_ns_steps: int = option(5, "Newton-Schulz iterations of Muon", least=1, most=100)
    muon_fp32_matmul_prec: str = option(
        "medium",
        "torch's precision of these iterations; medium: bf16",
        choices=("medium", "high", "highest"),
    )
    clip_grad: float = option(
        1.0, "maximum global gradient norm; 0: no clipping", least=0, most=1e30
    )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.min_lr > self.lr:
            raise InputError(
                f"--min-lr is {self.min_lr}, above --lr {self.lr}: choose at most --lr"
            )
        _check_muon(self, config)
        decay_iters = self.lr_decay_iters or config.training.train_iters
        if self.lr_warmup_iters >= decay_iters:
            raise InputError(
                f"--lr-warmup-iters is {self.lr_warmup_iters}: it must be below the "
                f"{decay_iters} iterations of the decay (--lr-decay-iters or --train-iters)"
            )
        wsd = self.lr_wsd_decay_iters
        if wsd is not None and wsd > decay_iters - self.lr_warmup_iters:
            raise InputError(
                f"--lr-wsd-decay-iters is {wsd}: it must be at most the "
                f"{decay_iters - self.lr_warmup_iters} iterations that follow the warm-up"
            )


def _check_muon(optimizer: OptimizerConfig, config: Config) -> None:
    if optimizer.optimizer == "muon":
        if config.parallel.use_distributed_optimizer:
            raise InputError(
                "--use-distributed-optimizer divides Adam's state, and --optimizer is muon: remove "
                "one of them"
            )
        return
    for each in fields(optimizer):
        value = getattr(optimizer, each.name)
        if each.name.startswith("muon_") and value != each.default:
            raise InputError(
                f"{flag(each.name)} is {shown(value)}, and --optimizer is {optimizer.optimizer}: "
                "remove it, or choose muon"
            )
