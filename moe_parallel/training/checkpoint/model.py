"""The tensors of a model by their names in a checkpoint, compared with the stored ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.utils import unwrap_model

from moe_parallel.collective_errors import exchange
from moe_parallel.config import read_yaml
from moe_parallel.config.message import flag
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.optimizer import MASTER


def model_tensors(model_chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """The sharded state dict of all model chunks of this rank."""
    # One key per layer, because layers may differ in kind and a pipeline may split anywhere.
    metadata = {"non_homogeneous_layers": True}
    return {
        f"chunk{index}": chunk.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(unwrap_model(list(model_chunks)))
    }


def placed_tensors(content: dict[str, Any]) -> list[ShardedTensor]:
    """Every sharded tensor in a sharded state dict, including those of factories."""
    sharded, _ = extract_sharded_base(content)
    apply_factories(sharded)
    return [tensor for tensor in nested_values(sharded) if isinstance(tensor, ShardedTensor)]


def check_tensors(
    checkpoint: Path,
    content: dict[str, Any],
    stored: dict[str, tuple[int, ...]],
    states: Mapping[str, object],
) -> None:
    """Compare the tensors to be read, on any rank, with the stored ones.

    `states`: by flag, the options that decide which numbers move after a step.

    Raises InputError on every rank for the first that is missing, unexpected, or of another shape.
    It names the options of `states` that differ in the checkpoint's config.yaml.
    """
    wanted = {
        tensor.key: (tuple(tensor.global_shape), tensor.allow_shape_mismatch)
        for tensor in placed_tensors(content)
    }
    everywhere = {key: value for of_rank in exchange(wanted) for key, value in of_rank.items()}
    reason = _difference(everywhere, stored)
    if not reason:
        return
    others = ", ".join(_other_values(checkpoint, states))
    if others:
        raise InputError(
            f"--load {checkpoint}: {others}, which needs other numbers ({reason}); use the values "
            "of its config.yaml, or load another checkpoint"
        )
    raise InputError(f"--load {checkpoint}: {reason}; use the checkpoint's config.yaml")


def _other_values(checkpoint: Path, states: Mapping[str, object]) -> list[str]:
    file = checkpoint / "config.yaml"
    recorded = (
        {flag(name): value for name, value in read_yaml(file).items()} if file.is_file() else {}
    )
    return [
        f"{name} is {recorded[name]} in the checkpoint and {value} here"
        for name, value in states.items()
        if name in recorded and recorded[name] != value
    ]


def _difference(
    wanted: dict[str, tuple[tuple[int, ...], bool]], stored: dict[str, tuple[int, ...]]
) -> str | None:
    for key, (shape, may_differ) in wanted.items():
        if key not in stored:
            return f"the model has {key}, which the checkpoint lacks"
        found = stored[key]
        if found != shape and not may_differ:
            return f"{key} is {list(found)} in the checkpoint and {list(shape)} here"
    read = {key.removeprefix(MASTER) for key in wanted}
    for key in stored:
        if key not in read and not key.startswith("optimizer."):
            return f"the checkpoint has {key}, which the model lacks"
    return None
