"""How many parameters a model has, and how many of them a token meets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch.overrides import TorchFunctionMode

from moe_parallel.config import Config
from moe_parallel.layers import ExpertLayer
from moe_parallel.model.gpt import build_chunks
from moe_parallel.parallel import Groups
from moe_parallel.telemetry.statistics import RoutingStatistics


@dataclass(frozen=True)
class ParameterCount:
    """Sizes of a whole model. Dense, the three are equal; with a router, the last two are."""

    total: int
    active: int  # what is not of an expert, and the K experts that a token chooses
    active_compute: int  # with AoE, the W_down of the other experts too: every token meets those


def count_parameters(config: Config, vocab_size: int, groups: Groups) -> ParameterCount:
    """Builds the model of `config` without storage and counts.

    Args:
        config: of the model; its parallel sizes are those of `groups`.
        vocab_size: of the tokenizer. Rounded up as the model rounds it, so padding counts.
        groups: of a single rank, which therefore holds the whole model. Megatron-Core's random
            states must be seeded, as for any model that it builds.
    """
    assert groups.etp_ep.size() == groups.tp.size() == groups.pp.size() == 1
    (model,) = _without_storage(config, vocab_size, groups)
    chosen = config.selection.moe_router_topk
    total = _size(model.parameters())
    active = active_compute = total
    for layer in model.modules():
        if isinstance(layer, ExpertLayer):
            idle = _unchosen(layer, layer.experts.parameters(), chosen)
            active_compute -= idle
            active -= idle + _unchosen(layer, layer.scoring_weights(), chosen)
    return ParameterCount(total, active, active_compute)


def _without_storage(config: Config, vocab_size: int, groups: Groups) -> list[GPTModel]:
    meta = torch.device("meta")
    statistics = RoutingStatistics(config.model.num_layers, config.moe.num_experts or 1, meta)
    with _NamedDevicesAreMeta(), meta:
        return build_chunks(config, config.padded_vocab_size(vocab_size), groups, statistics)


def _size(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _unchosen(layer: ExpertLayer, stacked: Iterable[torch.Tensor], chosen: int) -> int:
    """The part of weights stacked over experts that belongs to the experts not chosen."""
    return _size(stacked) // layer.num_experts * (layer.num_experts - chosen)


class _NamedDevicesAreMeta(TorchFunctionMode):
    """`with torch.device("meta")` holds where no device is named, and Megatron-Core names one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)
