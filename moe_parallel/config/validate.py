"""The rules that tie options together, checked once, before anything is built or written."""

from __future__ import annotations

from moe_parallel.config.config import Config
from moe_parallel.config.model import MoEConfig
from moe_parallel.config.option import flag, number, shown
from moe_parallel.config.selection import MergedSelection, selection_name
from moe_parallel.config.validate_fp8 import validate_fp8
from moe_parallel.config.validate_selection import validate_selection
from moe_parallel.config.validate_upcycling import validate_upcycling
from moe_parallel.errors import InputError


def validate(config: Config, world_size: int) -> None:
    """Raise InputError for the first rule that `config` on `world_size` ranks breaks."""
    _ranges(config)
    _model(config)
    _experts(config)
    validate_fp8(config)
    _gradient_accumulation_fusion(config)
    _layout(config, world_size)
    _pipeline(config)
    _batch(config, data_parallel_size(config, world_size))
    _schedule(config)
    _checkpoints(config)
    _split(config.data.split)
    _first_part(config)


def validate_layer(config: Config) -> None:
    """Raise InputError for the first rule on experts, and on single values, that `config` breaks.

    For one layer of experts, whatever the model around it.
    """
    _ranges(config)
    _experts(config)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Ranks left for data parallelism after tensor and pipeline parallelism."""
    parallel = config.parallel
    return world_size // (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    )


_AT_LEAST = {
    0: (
        "lr_warmup_iters lr min_lr weight_decay adam_beta1 adam_beta2 clip_grad "
        "moe_aux_loss_coeff moe_z_loss_coeff moe_importance_loss_coeff moe_entropy_loss_coeff "
        "moe_input_jitter_eps smear_expert_dropout seed fp8_margin aoe_fp8_screening eval_iters"
    ),
    1: (
        "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size num_experts "
        "moe_ffn_hidden_size moe_router_topk aoe_low_rank_size aoe_wide_size rotary_base "
        "make_vocab_size_divisible_by tensor_model_parallel_size pipeline_model_parallel_size "
        "num_layers_per_virtual_pipeline_stage expert_model_parallel_size "
        "expert_tensor_parallel_size micro_batch_size global_batch_size seq_length train_iters "
        "exit_interval lr_decay_iters lr_wsd_decay_iters save_interval keep_last log_interval "
        "eval_interval eval_first_part vocab_size moe_router_hidden_size "
        "moe_gate_low_rank_size "
        "moe_shared_expert_intermediate_size moe_router_num_groups moe_router_group_topk "
        "moe_inference_max_experts lory_segment_length fp8_amax_history_len"
    ),
}
_ABOVE_0 = (
    "init_method_std norm_epsilon adam_eps moe_expert_capacity_factor distributed_timeout_minutes "
    "moe_top_p moe_inference_top_p moe_expert_choice_capacity_factor moe_router_bias_update_rate"
)
# Far above any use: they keep a slip of the keyboard from filling the memory, or fp32.
_AT_MOST = {
    "num_layers": 10_000,
    "lr": 1_000,
    "clip_grad": 1e30,  # as good as off
    "distributed_timeout_minutes": 1_000_000,
    "fp8_amax_history_len": 100_000,
    "fp8_margin": 100,
}
_INTEGER_AT_MOST = 2**31 - 1
_FLOAT_AT_MOST = 1_000_000
_FLOAT_ABOVE_0_AT_LEAST = 1e-30
_PROBABILITIES = "moe_top_p moe_inference_top_p"
_BELOW_1 = "adam_beta1 adam_beta2 moe_input_jitter_eps smear_expert_dropout"


def _ranges(config: Config) -> None:
    values = {name: value for _, part in config.values() for name, value in part.items()}
    for least, names in _AT_LEAST.items():
        for name in names.split():
            value = values.get(name)
            if value is not None and not value >= least:
                raise InputError(f"{flag(name)} is {value}: it must be at least {least}")
    for name in _ABOVE_0.split():
        value = values.get(name)
        if value is not None and not value > 0:
            raise InputError(f"{flag(name)} is {value}: it must be above 0")
    for name, value in values.items():
        if type(value) not in (int, float):
            continue
        most = _AT_MOST.get(name, _INTEGER_AT_MOST if type(value) is int else _FLOAT_AT_MOST)
        if value > most:
            raise InputError(f"{flag(name)} is {shown(value)}: it must be at most {most}")
        if 0 < value < _FLOAT_ABOVE_0_AT_LEAST:
            raise InputError(
                f"{flag(name)} is {value}, too small for fp32: it must be at least "
                f"{_FLOAT_ABOVE_0_AT_LEAST}, or 0 where that means off"
            )
    for name in _BELOW_1.split():
        if values.get(name, 0) >= 1:
            raise InputError(f"{flag(name)} is {values[name]}: it must be below 1")
    for name in _PROBABILITIES.split():
        if (values.get(name) or 0) > 1:
            raise InputError(f"{flag(name)} is {values[name]}: it must be at most 1")


def _divides(config_value: int, name: str, divisor: int, divisor_name: str) -> None:
    if config_value % divisor:
        raise InputError(
            f"{flag(name)} is {config_value}, which {flag(divisor_name)} {divisor} does not "
            f"divide: choose a multiple of {divisor}"
        )


def _model(config: Config) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    _divides(model.hidden_size, "hidden_size", model.num_attention_heads, "num_attention_heads")
    if (model.hidden_size // model.num_attention_heads) % 2:
        raise InputError(
            f"--hidden-size {model.hidden_size} over --num-attention-heads "
            f"{model.num_attention_heads} gives heads of odd size, which rotary positions cannot "
            "turn: change one of them"
        )
    _divides(
        model.num_attention_heads, "num_attention_heads", model.query_groups, "num_query_groups"
    )
    for name, size in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.query_groups),
        ("ffn_hidden_size", model.ffn_hidden_size),
        ("make_vocab_size_divisible_by", model.make_vocab_size_divisible_by),
    ):
        _divides(size, name, tp, "tensor_model_parallel_size")


def _experts(config: Config) -> None:
    moe, parallel = config.moe, config.parallel
    if moe.num_experts is None:
        if parallel.expert_model_parallel_size > 1:
            raise InputError(
                f"--expert-model-parallel-size is {parallel.expert_model_parallel_size}, but the "
                "model is dense: set --num-experts"
            )
        _no_expert_options(config)
        return
    _divides(
        moe.num_experts,
        "num_experts",
        parallel.expert_model_parallel_size,
        "expert_model_parallel_size",
    )
    if config.expert_width < 1:
        raise InputError(
            f"Eq. 5 leaves the experts a width of {config.expert_width}: lower --aoe-low-rank-size "
            "(or --moe-gate-low-rank-size), or set --aoe-wide-size"
        )
    if config.expert_width % parallel.expert_tensor_size:
        raise InputError(
            f"the expert width is {config.expert_width}, which --expert-tensor-parallel-size "
            f"{parallel.expert_tensor_size} does not divide: set --moe-ffn-hidden-size (AoE: "
            "--aoe-wide-size) to a multiple"
        )
    if not any(config.moe_layers):
        raise InputError(
            f"--moe-layer-freq {moe.moe_layer_freq} leaves no MoE layer: for a dense model "
            "remove --num-experts"
        )
    for name in (
        "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy",
        "moe_capacity_counts_topk",
    ):
        changed = getattr(moe, name) != getattr(MoEConfig(), name)
        if changed and moe.moe_expert_capacity_factor is None:
            raise InputError(f"{flag(name)} needs a capacity: set --moe-expert-capacity-factor")
    validate_selection(config)
    validate_upcycling(config)


def _no_expert_options(config: Config) -> None:
    """A dense model takes no option of experts: one that is set would change nothing."""
    defaults = dict(Config().values())
    given = dict(config.values())
    for name, value in {**given["selection"], **given["moe"]}.items():
        known = {**defaults["selection"], **defaults["moe"]}
        if name != "moe_backend" and value != known.get(name):
            raise InputError(
                f"{flag(name)} is {shown(value)}, but the model is dense: set --num-experts, or "
                "leave the flag out"
            )


def _gradient_accumulation_fusion(config: Config) -> None:
    if not config.training.gradient_accumulation_fusion:
        return
    asked = "--gradient-accumulation-fusion is for the kernels of experts that tokens are sent to"
    if config.moe.num_experts is None:
        raise InputError(f"{asked}, but the model is dense: set --num-experts, or leave it out")
    if isinstance(config.selection, MergedSelection):
        raise InputError(
            f"{asked}, and --expert-selection {selection_name(config.selection)} merges its "
            "experts: leave one of them out"
        )
    if config.fp8.fp8_format is not None:
        raise InputError(
            f"{asked}, and --fp8-format {config.fp8.fp8_format} leaves their products to "
            "Transformer Engine: leave one of them out"
        )


def _layout(config: Config, world_size: int) -> None:
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if world_size % (tp * pp):
        raise InputError(
            f"{world_size} ranks cannot be cut into --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}: start a multiple of {tp * pp} ranks "
            "(--nproc-per-node) or change the sizes"
        )
    if world_size % (etp * ep * pp):
        raise InputError(
            f"{world_size} ranks cannot be cut into --expert-tensor-parallel-size {etp} x "
            f"--expert-model-parallel-size {ep} x --pipeline-model-parallel-size {pp}: start a "
            f"multiple of {etp * ep * pp} ranks (--nproc-per-node) or change the sizes"
        )
    if tp > 1:
        _divides(
            config.training.seq_length,
            "seq_length",
            tp,
            "tensor_model_parallel_size",
        )
    if parallel.sequence_parallel and tp == 1:
        raise InputError(
            "--sequence-parallel splits activations over tensor-parallel ranks, but "
            "--tensor-model-parallel-size is 1: raise it or leave the flag out"
        )


def _pipeline(config: Config) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    pp = parallel.pipeline_model_parallel_size
    _divides(layers, "num_layers", pp, "pipeline_model_parallel_size")
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


def _batch(config: Config, dp: int) -> None:
    training = config.training
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


def _schedule(config: Config) -> None:
    optimizer, training = config.optimizer, config.training
    if optimizer.min_lr > optimizer.lr:
        raise InputError(
            f"--min-lr is {optimizer.min_lr}, above --lr {optimizer.lr}: choose at most --lr"
        )
    decay_iters = optimizer.lr_decay_iters or training.train_iters
    if optimizer.lr_warmup_iters >= decay_iters:
        raise InputError(
            f"--lr-warmup-iters is {optimizer.lr_warmup_iters}: it must be below the "
            f"{decay_iters} iterations of the decay (--lr-decay-iters or --train-iters)"
        )
    wsd = optimizer.lr_wsd_decay_iters
    if wsd is not None and wsd > decay_iters - optimizer.lr_warmup_iters:
        raise InputError(
            f"--lr-wsd-decay-iters is {wsd}: it must be at most the "
            f"{decay_iters - optimizer.lr_warmup_iters} iterations that follow the warm-up"
        )


def _checkpoints(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.keep_last is not None and checkpoint.save is None:
        raise InputError("--keep-last bounds the checkpoints of a run: set --save too")
    if checkpoint.save_interval is not None and checkpoint.save is None:
        raise InputError("--save-interval needs a folder to save in: set --save too")
    for name in ("finetune", "override_opt_param_scheduler"):
        if getattr(checkpoint, name) and checkpoint.load is None:
            raise InputError(f"{flag(name)} starts from a checkpoint: name one by --load")
    for name in ("moe_use_upcycling", "moe_dense_warmup_percent"):
        if checkpoint.finetune and getattr(config.moe, name):
            raise InputError(
                f"--finetune starts from the weights of --load as they are, and {flag(name)} makes "
                "experts of them: leave one of them out"
            )


def _first_part(config: Config) -> None:
    first, length = config.logging.eval_first_part, config.training.seq_length
    if first is not None and first >= length:
        raise InputError(
            f"--eval-first-part is {first}, which leaves nothing of --seq-length {length}: choose "
            f"at most {length - 1}"
        )


def _split(split: str) -> None:
    parts = [number(part.strip()) for part in split.split(",")]
    valid = all(part is not None and 0 <= part <= _FLOAT_AT_MOST for part in parts)
    if not (valid and len(parts) <= 3 and parts[0]):
        raise InputError(
            f"--split is {shown(split)}: it takes up to three parts such as 969,30,1, none of them "
            "negative and the first above 0"
        )
