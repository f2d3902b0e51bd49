"""The number of parameters of a model, and how many of them a token uses."""

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
    """Sizes of a complete model. All three are equal if it is dense, the last two with a router."""

    total: int
    #: The parameters outside experts, and of the experts that compute a token (merged experts count
    #: as one expert); None: the number of these experts is not known.
    active: int | None
    active_compute: int | None  # with AoE, includes every W_down, because each token uses them all


def count_parameters(
    config: Config, vocab_size: int, groups: Groups, experts_per_token: float | None = None
) -> ParameterCount:
    """Builds the model of `config` without storage and counts.

    Args:
        config: of the model; its parallel sizes are those of `groups`.
        vocab_size: of the tokenizer. It is rounded up as in the model, so padding counts.
        groups: of a single rank, which therefore has the complete model. Megatron-Core's random
            states must be seeded, as for any model that it builds.
        experts_per_token: on average; None: the system's number, if that is known before
            training.
    """
    assert groups.etp_ep.size() == groups.tp.size() == groups.pp.size() == 1
    (model,) = _without_storage(config, vocab_size, groups)
    total = _size(model.parameters())
    layers = [layer for layer in model.modules() if isinstance(layer, ExpertLayer)]
    chosen = experts_per_token or config.selection.mean_choices
    if not layers:
        return ParameterCount(total, total, total)
    if chosen is None:
        return ParameterCount(total, None, None)
    idle = sum(_unchosen(layer, layer.expert_weights(), chosen) for layer in layers)
    scoring = sum(_unchosen(layer, layer.scoring_weights(), chosen) for layer in layers)
    return ParameterCount(total, total - idle - scoring, total - idle)


def _without_storage(config: Config, vocab_size: int, groups: Groups) -> list[GPTModel]:
    meta = torch.device("meta")
    statistics = RoutingStatistics(config.model.num_layers, config.moe.num_experts or 1, meta)
    with _NamedDevicesAreMeta(), meta:
        return build_chunks(config, config.padded_vocab_size(vocab_size), groups, statistics)


def _size(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _unchosen(layer: ExpertLayer, stacked: Iterable[torch.Tensor], chosen: float) -> int:
    """The number of parameters of the experts that are not chosen, in weights stacked over all."""
    return round(_size(stacked) // layer.num_experts * (layer.num_experts - chosen))


class _NamedDevicesAreMeta(TorchFunctionMode):
    """Puts tensors on meta even if a device is named, which torch.device("meta") alone does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)
