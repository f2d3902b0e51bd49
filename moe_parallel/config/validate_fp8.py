"""The rules of experts in FP8."""

from __future__ import annotations

from moe_parallel.config.config import Config
from moe_parallel.config.fp8 import Fp8Config
from moe_parallel.config.option import flag
from moe_parallel.config.selection import (
    AutonomousSelection,
    MergedSelection,
    RoutedSelection,
    selection_name,
)
from moe_parallel.errors import InputError

_OF_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")


def validate_fp8(config: Config) -> None:
    """Raise InputError for the first rule of FP8 that `config` breaks.

    Whether this host can compute in FP8 is found out when the model is built.
    """
    _options(config.fp8)
    if config.fp8.fp8_format is None:
        return
    chosen = f"--fp8-format {config.fp8.fp8_format}"
    if config.moe.num_experts is None:
        raise InputError(
            f"{chosen} is for experts, but the model is dense: set --num-experts, or leave it out"
        )
    if isinstance(config.selection, MergedSelection):
        raise InputError(
            f"{chosen} is for experts that tokens are sent to, and --expert-selection "
            f"{selection_name(config.selection)} merges its experts: leave one of them out"
        )
    if not config.training.bf16:
        raise InputError(f"{chosen} computes everything else in bfloat16: set --bf16")
    if config.fp8.fp8_recipe == "delayed":
        _delayed(config)
    _widths(config)


def _options(fp8: Fp8Config) -> None:
    """An option that would change nothing is refused."""
    default = Fp8Config()
    for name in ("fp8_recipe", *_OF_DELAYED):
        value = getattr(fp8, name)
        if value == getattr(default, name):
            continue
        if fp8.fp8_format is None:
            raise InputError(f"{flag(name)} is {value}, but FP8 is off: set --fp8-format")
        if name in _OF_DELAYED and fp8.fp8_recipe != "delayed":
            raise InputError(
                f"{flag(name)} is {value}, which only --fp8-recipe delayed has, not "
                f"{fp8.fp8_recipe}: leave it out"
            )


def _delayed(config: Config) -> None:
    if config.training.recompute_granularity is not None:
        raise InputError(
            "--fp8-recipe delayed scales a second forward pass otherwise than the first, so "
            f"--recompute-granularity {config.training.recompute_granularity} would differentiate "
            "another function: set --fp8-recipe tensorwise or blockwise"
        )
    if config.fp8.fp8_amax_compute_algo == "max" and config.virtual_stages is not None:
        raise InputError(
            "--fp8-amax-compute-algo max looks back over --fp8-amax-history-len passes, and with "
            "--num-layers-per-virtual-pipeline-stage passes of other stages are counted among "
            "them: set --fp8-amax-compute-algo most_recent"
        )


def _widths(config: Config) -> None:
    multiple = config.fp8.multiple
    shards = config.parallel.expert_tensor_size
    for what, width, remedy in (
        ("--hidden-size", config.model.hidden_size, "it"),
        (
            f"the experts' width over --expert-tensor-parallel-size {shards}",
            config.expert_width // shards,
            "--moe-ffn-hidden-size (AoE: --aoe-wide-size)",
        ),
        *_low_rank(config),
    ):
        if width % multiple:
            raise InputError(
                f"{what} is {width}, and --fp8-recipe {config.fp8.fp8_recipe} takes multiples of "
                f"{multiple}: change {remedy}"
            )


def _low_rank(config: Config) -> list[tuple[str, int, str]]:
    selection = config.selection
    if isinstance(selection, AutonomousSelection):
        return [("--aoe-low-rank-size", selection.aoe_low_rank_size, "it")]
    if isinstance(selection, RoutedSelection) and selection.moe_gate_low_rank_size is not None:
        return [("--moe-gate-low-rank-size", selection.moe_gate_low_rank_size, "it")]
    return []
