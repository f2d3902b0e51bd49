"""The dense model that experts can start from, by the configuration of the experts' model."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from moe_parallel.config.config import Config
from moe_parallel.config.fp8 import Fp8Config
from moe_parallel.config.model import MoEConfig
from moe_parallel.config.selection import TopKSelection


def dense_width(config: Config) -> int:
    """Width of the dense layer that an expert starts as: d_ffn of one expert."""
    return config.moe.moe_ffn_hidden_size or config.model.ffn_hidden_size


def dense_twin(config: Config) -> Config:
    """The model of `config` with a dense layer, as wide as one expert, for each MoE layer.

    Everything else is the same; what only experts have is at its default.
    """
    return replace(
        config,
        model=replace(config.model, ffn_hidden_size=dense_width(config)),
        moe=MoEConfig(moe_backend=config.moe.moe_backend),
        selection=TopKSelection(),
        training=replace(config.training, gradient_accumulation_fusion=False),
        fp8=Fp8Config(),
    )


def dense_warmup_iters(config: Config) -> int:
    """Iterations of the dense warm-up: its share of --train-iters, rounded up."""
    # As a float, 7 % of 100 iterations is a little more than 7, and so 8.
    share = Fraction(str(config.moe.moe_dense_warmup_percent)) / 100
    return math.ceil(share * config.training.train_iters)
