"""What every system of expert selection shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import divides, flag, shown
from moe_parallel.config.option import option
from moe_parallel.config.section import Section
from moe_parallel.config.upcycling import check_upcycling
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class MoEConfig(Section):
    """What every expert-selection system shares: how many experts, how wide, where, how full."""

    num_experts: int | None = option(
        None, "experts per MoE layer (n); none: a dense model", least=1
    )
    moe_ffn_hidden_size: int | None = option(
        None, "expert width (d_ffn of one expert); none: --ffn-hidden-size", least=1
    )
    moe_layer_freq: str = option(
        "1",
        "N: every N-th layer is MoE (layers 1, N+1, ...); or a pattern such as [0]+[1]*23 "
        "(in YAML in quotes)",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "an expert takes at most ceil(tokens * K / n * factor) of the tokens that one rank "
        "routes in a micro-batch; none: dropless",
        above=0,
    )
    moe_capacity_counts_topk: bool = option(
        True,
        "count K in that capacity; false: ceil(tokens / n * factor). Where K varies it is not "
        "counted",
    )
    moe_token_drop_policy: str = option(
        "probs",
        "which choices an over-full expert drops: those of least gate, or the latest by position "
        "with all first choices ahead of second choices",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False, "pad every expert's input with zero rows to its capacity, so that sizes are static"
    )
    moe_dense_warmup_percent: float = option(
        0.0,
        "train dense for this share of --train-iters, then copy the feed-forward layers and their "
        "optimizer state into every expert; 0: off",
        least=0,
        below=100,
    )
    moe_use_upcycling: bool = option(
        False, "--load names a dense checkpoint: copy its feed-forward layers into every expert"
    )
    moe_backend: str = option(
        "auto",
        "kernels: plain torch (reference), C++/CUDA (native), native where it is built (auto)",
        choices=("reference", "native", "auto"),
    )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.num_experts is None:
            _check_dense(config)
            return
        _check_experts(self, config)
        _check_capacity(self)
        check_upcycling(config)


def _check_experts(moe: MoEConfig, config: Config) -> None:
    parallel = config.parallel
    divides(
        moe.num_experts or 0,
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


def _check_capacity(moe: MoEConfig) -> None:
    for name in (
        "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy",
        "moe_capacity_counts_topk",
    ):
        changed = getattr(moe, name) != getattr(MoEConfig(), name)
        if changed and moe.moe_expert_capacity_factor is None:
            raise InputError(f"{flag(name)} needs a capacity: set --moe-expert-capacity-factor")


def _check_dense(config: Config) -> None:
    """A dense model takes no option of experts: one that is set would change nothing."""
    parallel = config.parallel
    if parallel.expert_model_parallel_size > 1:
        raise InputError(
            f"--expert-model-parallel-size is {parallel.expert_model_parallel_size}, but the "
            "model is dense: set --num-experts"
        )
    defaults = dict(type(config)().values())
    given = dict(config.values())
    for name, value in {**given["selection"], **given["moe"]}.items():
        known = {**defaults["selection"], **defaults["moe"]}
        if name != "moe_backend" and value != known.get(name):
            raise InputError(
                f"{flag(name)} is {shown(value)}, but the model is dense: set --num-experts, or "
                "leave the flag out"
            )
