"""The options of FP8 experts, with the names that Megatron-Core gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import flag
from moe_parallel.config.option import Section, option
from moe_parallel.config.training import EXPERTS
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class Fp8Config(Section):
    """Experts in FP8 by Transformer Engine (docs/fp8.md); scores are not in FP8."""

    fp8_format: str | None = option(
        None,
        "compute experts in FP8: e4m3 everywhere (e4m3), or e5m2 for gradients (hybrid); none: off",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = option(
        "delayed",
        "scale of a tensor before rounding: from the maxima of earlier passes (delayed), from "
        "its own maximum (tensorwise), or per block of 128 values (blockwise)",
        choices=("delayed", "tensorwise", "blockwise"),
    )
    fp8_margin: int = option(0, "delayed: divide scales by 2^margin", least=0, most=100)
    fp8_amax_history_len: int = option(
        1, "delayed: number of passes whose maxima are kept", least=1, most=100_000
    )
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "delayed: scale by the latest kept maximum (most_recent) or by the largest (max)",
        choices=("most_recent", "max"),
    )

    @property
    def multiple(self) -> int:
        """The number of which both sizes of every matrix must be a multiple."""
        return 128 if self.fp8_recipe == "blockwise" else 16

    def check(self, config: Config, world_size: int) -> None:
        """Checks the options; the build of the model checks whether this host supports FP8."""
        super().check(config, world_size)
        _check_options(self)
        if self.fp8_format is None:
            return
        chosen = f"--fp8-format {self.fp8_format}"
        if config.moe.num_experts is None:
            raise InputError(
                f"{chosen} is for experts, but the model is dense: set --num-experts, or leave it "
                "out"
            )
        if config.selection.merges:
            raise InputError(
                f"{chosen} is for experts that tokens are sent to, and --expert-selection "
                f"{config.selection.system} merges its experts: remove one of them"
            )
        if config.moe.moe_activation_budget is not None:
            raise InputError(
                f"{chosen} has no bound on the experts' activations: remove "
                f"--moe-activation-budget {config.moe.moe_activation_budget} or --fp8-format"
            )
        if config.parallel.moe_dispatch_parts > 1:
            raise InputError(
                f"{chosen} computes all experts of a rank at once: remove --moe-dispatch-parts "
                f"{config.parallel.moe_dispatch_parts} or --fp8-format"
            )
        if not config.training.bf16:
            raise InputError(f"{chosen} computes everything else in bfloat16: set --bf16")
        if self.fp8_recipe == "delayed":
            _check_delayed(config)
        _check_widths(config)


_OF_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")


def _check_options(fp8: Fp8Config) -> None:
    """Raise InputError for an option that would have no effect."""
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


def _check_delayed(config: Config) -> None:
    training = config.training
    if training.recompute_granularity == "full" or EXPERTS in training.recomputed_modules:
        of_modules = f" --recompute-modules {EXPERTS}" if training.recomputed_modules else ""
        raise InputError(
            "--fp8-recipe delayed scales a second forward pass differently from the first, so "
            f"--recompute-granularity {training.recompute_granularity}{of_modules} would "
            "differentiate another function: set --fp8-recipe tensorwise or blockwise"
        )
    if config.fp8.fp8_amax_compute_algo == "max" and config.virtual_stages is not None:
        raise InputError(
            "--fp8-amax-compute-algo max looks back over --fp8-amax-history-len passes, and with "
            "--num-layers-per-virtual-pipeline-stage passes of other stages are counted among "
            "them: set --fp8-amax-compute-algo most_recent"
        )


def _check_widths(config: Config) -> None:
    multiple = config.fp8.multiple
    shards = config.parallel.expert_tensor_size
    for what, width, remedy in (
        ("--hidden-size", config.model.hidden_size, "it"),
        (
            f"the experts' width over --expert-tensor-parallel-size {shards}",
            config.expert_width // shards,
            "--moe-ffn-hidden-size (AoE: --aoe-wide-size)",
        ),
        *[(its_flag, size, "it") for its_flag, size in config.selection.low_rank_sizes],
    ):
        if width % multiple:
            raise InputError(
                f"{what} is {width}, and --fp8-recipe {config.fp8.fp8_recipe} takes multiples of "
                f"{multiple}: change {remedy}"
            )
