"""The rules of --cuda-graph-impl: what a graph of a step cannot record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moe_parallel.config.message import flag, shown
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

_MODEL_PARALLEL = (
    "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip

#: Options of systems with which the host takes part in each step.
_OF_THE_HOST = {
    "moe_router_trace": "the choices of each step are written to a file",
    "moe_router_replay": "the choices of each step are read from a file",
    "moe_erc_loss_coeff": "a generator of random numbers is seeded in each step",
    "moe_input_jitter_eps": "the state of random numbers is set in each step",
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
    training, selection = config.training, config.selection
    for name in _MODEL_PARALLEL:
        if (getattr(config.parallel, name) or 1) > 1:
            yield _told(config.parallel, name), "each GPU must hold a complete model"
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(config.parallel, name):
            yield _told(config.parallel, name), "the host starts these exchanges in each step"
    if training.recompute_granularity is not None:
        yield (
            _told(training, "recompute_granularity"),
            "Megatron-Core reads the state of random numbers in each step",
        )
    if training.attention_backend in ("local", "transformer_engine"):
        yield (
            _told(training, "attention_backend"),
            "it takes numbers from the host, or sets the state of random numbers, in each step",
        )
    if training.reset_attention_mask:
        yield _told(training, "reset_attention_mask"), "the host reads where documents begin"
    if config.fp8.fp8_format is not None:
        yield (
            _told(config.fp8, "fp8_format"),
            "Transformer Engine takes the numbers of rows from the host",
        )
    if any(config.moe_layers):
        yield from _obstacles_of_experts(config, selection)


def _obstacles_of_experts(config: Config, selection: Any) -> Iterator[tuple[str, str]]:
    varies = "the number of rows of the experts varies, and the host reads it"
    if selection.choices_per_token is None:
        yield f"--expert-selection {selection.system}", varies
    if selection.free_experts:
        yield "free experts", varies
    moe = config.moe
    if moe.moe_expert_capacity_factor is not None and not moe.moe_pad_expert_input_to_capacity:
        yield (
            f"{_told(moe, 'moe_expert_capacity_factor')} without "
            "--moe-pad-expert-input-to-capacity",
            varies,
        )
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
