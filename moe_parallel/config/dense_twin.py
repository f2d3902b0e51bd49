"""The configuration of the dense model from which a model with experts can start."""

from __future__ import annotations

from dataclasses import replace

from moe_parallel.config.config import Config
from moe_parallel.config.fp8 import Fp8Config
from moe_parallel.config.moe import MoEConfig
from moe_parallel.config.selection import TopKSelection
from moe_parallel.config.upcycling import dense_width


def dense_twin(config: Config) -> Config:
    """The model of `config` with a dense layer, as wide as one expert, for each MoE layer.

    All other options are the same, except that options only for experts have their defaults.
    """
    return replace(
        config,
        model=replace(config.model, ffn_hidden_size=dense_width(config)),
        moe=MoEConfig(moe_backend=config.moe.moe_backend),
        selection=TopKSelection(),
        fp8=Fp8Config(),
    )
