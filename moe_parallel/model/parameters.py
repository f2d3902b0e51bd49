"""The number of parameters of a model, and how many of them a token uses."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

from moe_parallel.config import Config
from moe_parallel.layers import ExpertLayer
from moe_parallel.model.gpt import build_chunks
from moe_parallel.parallel import Groups, groups_of_one
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
        groups: of a single rank, which therefore has the complete model.
        experts_per_token: on average; None: the system's number, if that is known before
            training.
    """
    assert groups.etp_ep.size() == groups.tp.size() == groups.pp.size() == 1
    (model,) = model_without_storage(config, vocab_size, groups)
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


@dataclass(frozen=True)
class PartSizes:
    """The numbers of weights of a part of a model on one rank."""

    dense: int
    expert: int  # divided over ep and etp
    table: int = 0  # of `dense`, those of the table of the vocabulary


def sizes_of_parts(config: Config, vocab_size: int, groups: Groups) -> dict[str, PartSizes]:
    """The sizes of embedding, dense layer, MoE layer and head: built once each, without storage."""
    kinds = sorted(set(config.moe_layers))
    small = replace(
        config,
        model=replace(config.model, num_layers=len(kinds)),
        moe=replace(config.moe, moe_layer_freq="+".join(f"[{int(moe)}]" for moe in kinds)),
        parallel=replace(
            config.parallel,
            pipeline_model_parallel_size=1,
            num_layers_per_virtual_pipeline_stage=None,
        ),
    )
    (model,) = model_without_storage(small, vocab_size, replace(groups, pp=groups_of_one().pp))
    names = ["moe layer" if is_moe else "dense layer" for is_moe in kinds]
    counts: dict[str, Counter[str]] = {each: Counter() for each in (*names, "embedding", "head")}
    for name, weight in model.named_parameters():
        words = name.split(".")
        in_layer = words[:2] == ["decoder", "layers"]
        part = names[int(words[2])] if in_layer else "head"
        part = "embedding" if words[0] == "embedding" else part
        kind = "dense" if getattr(weight, "allreduce", True) else "expert"
        counts[part][kind] += weight.numel()
        if not in_layer and "norm" not in name:
            counts[part]["table"] += weight.numel()
    return {
        name: PartSizes(each["dense"], each["expert"], each["table"])
        for name, each in counts.items()
    }


def model_without_storage(config: Config, vocab_size: int, groups: Groups) -> list[GPTModel]:
    """The chunks of the model, with tensors on meta."""
    meta = torch.device("meta")
    statistics = RoutingStatistics(config.model.num_layers, config.moe.num_experts or 1, meta)
    with NamedDevicesAreMeta(), meta, without_random_states():
        return build_chunks(config, config.padded_vocab_size(vocab_size), groups, statistics)


def _size(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _unchosen(layer: ExpertLayer, stacked: Iterable[torch.Tensor], chosen: float) -> int:
    """The number of parameters of the experts that are not chosen, in weights stacked over all."""
    return round(_size(stacked) // layer.num_experts * (layer.num_experts - chosen))


def without_random_states() -> Any:
    """Inside, Megatron-Core draws from no state of its own, because nothing has numbers."""
    nothing = mock.Mock(side_effect=lambda *_: contextlib.nullcontext())
    return mock.patch.object(random.CudaRNGStatesTracker, "fork", nothing)


class NamedDevicesAreMeta(TorchFunctionMode):
    """Puts tensors on meta even if a device is named, which torch.device("meta") alone does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)
