"""The rules of upcycling, which starts experts from dense layers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


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
