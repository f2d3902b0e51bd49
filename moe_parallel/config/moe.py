"""The options that every system of expert selection has, and the rules of upcycling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from moe_parallel.config.message import divides, flag, shown
from moe_parallel.config.option import Section, option
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class MoEConfig(Section):
    """The experts of every system: their number, width, layers and capacity."""

    num_experts: int | None = option(
        None,
        "number of experts per MoE layer (n); none: a dense model, so set it for an MoE",
        least=1,
    )
    moe_ffn_hidden_size: int | None = option(
        None, "width of an expert (its d_ffn); none: --ffn-hidden-size", least=1
    )
    moe_layer_freq: str = option(
        "1",
        "which layers are MoE layers: N for every N-th layer (1, N+1, ...), or a pattern such "
        "as [0]+[1]*23 (quote it in YAML)",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "capacity: an expert accepts at most ceil(tokens * K / n * factor) of the tokens that "
        "one rank routes in a micro-batch; none: no limit (dropless)",
        above=0,
    )
    moe_capacity_counts_topk: bool = option(
        True,
        "include K in the capacity; false: ceil(tokens / n * factor). K is never included if "
        "it varies",
    )
    moe_token_drop_policy: str = option(
        "probs",
        "which choices a full expert drops: those with the smallest routing probabilities "
        "(probs), or the last ones by position, second choices before first choices (position)",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "pad each expert's input with zero rows up to its capacity, so that all sizes are static",
    )
    moe_activation_budget: float | None = option(
        None,
        "largest size, in MiB, of the experts' activations that exist at a time in an MoE layer of "
        "a rank. If its rows need more, they are computed in parts, and the backward pass "
        "recomputes each part; none: no limit",
        above=0,
    )
    moe_dense_warmup_percent: float = option(
        0.0,
        "train a dense model for this percentage of --train-iters, then copy its feed-forward "
        "layers and their optimizer state into every expert; 0: off",
        least=0,
        below=100,
    )
    moe_use_upcycling: bool = option(
        False, "--load names a dense checkpoint: copy its feed-forward layers into every expert"
    )
    moe_backend: str = option(
        "auto",
        "operators: plain torch (reference), C++/CUDA (native), or native if it is built (auto)",
        choices=("reference", "native", "auto"),
    )

    @property
    def activation_budget_bytes(self) -> int | None:
        """The activation budget in bytes. None: no limit."""
        budget = self.moe_activation_budget
        return None if budget is None else math.floor(budget * 2**20)

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
            f"Eq. 5 gives an expert width of {config.expert_width}: lower --aoe-low-rank-size "
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
    if moe.moe_activation_budget is not None and moe.moe_pad_expert_input_to_capacity:
        raise InputError(
            f"--moe-activation-budget is {moe.moe_activation_budget}, whose parts vary in size, "
            "but --moe-pad-expert-input-to-capacity keeps all sizes static: remove one of them"
        )


def _check_dense(config: Config) -> None:
    """Raise InputError for an option of experts that is set for a dense model."""
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


def dense_width(config: Config) -> int:
    """The width of the dense layer from which an expert starts: d_ffn of one expert."""
    return config.moe.moe_ffn_hidden_size or config.model.ffn_hidden_size


def dense_warmup_iters(config: Config) -> int:
    """The number of iterations of the dense warm-up: its share of --train-iters, rounded up."""
    # In floating point, 7% of 100 iterations is slightly more than 7 and would become 8.
    share = Fraction(str(config.moe.moe_dense_warmup_percent)) / 100
    return math.ceil(share * config.training.train_iters)


def check_upcycling(config: Config) -> None:
    """Raise InputError for the first rule of upcycling or of the dense warm-up that is broken.

    Other rules have been checked before: there are experts, and --moe-layer-freq can be read.
    """
    moe = config.moe
    percent = moe.moe_dense_warmup_percent
    if percent:
        _warm_up(config)
    if percent or moe.moe_use_upcycling:
        _widths(config)


def _warm_up(config: Config) -> None:
    percent, tp = config.moe.moe_dense_warmup_percent, config.parallel.tensor_model_parallel_size
    if config.moe.moe_use_upcycling:
        raise InputError(
            f"--moe-use-upcycling converts a dense checkpoint at the start and "
            f"--moe-dense-warmup-percent {percent} later: remove one of them"
        )
    if dense_warmup_iters(config) >= config.training.train_iters:
        raise InputError(
            f"--moe-dense-warmup-percent {percent} of --train-iters "
            f"{config.training.train_iters} leaves no iterations with experts: lower it"
        )
    if dense_width(config) % tp:
        raise InputError(
            f"--moe-dense-warmup-percent {percent} needs dense layers as wide as an expert, "
            f"{dense_width(config)}, which --tensor-model-parallel-size {tp} does not divide: "
            "change --moe-ffn-hidden-size"
        )


def _widths(config: Config) -> None:
    model, width = config.model, dense_width(config)
    if not all(config.moe_layers) and width != model.ffn_hidden_size:
        raise InputError(
            f"--moe-layer-freq {config.moe.moe_layer_freq} keeps dense layers of "
            f"--ffn-hidden-size {model.ffn_hidden_size} next to experts of --moe-ffn-hidden-size "
            f"{width}, and the dense model that they start from has one width: make them equal"
        )
    if config.expert_width < width:
        raise InputError(
            f"the experts' width (--aoe-wide-size or Eq. 5) is {config.expert_width}, below the "
            f"{width} of the dense layers that they start from: set it to {width} or more, or "
            "lower --aoe-low-rank-size"
        )
