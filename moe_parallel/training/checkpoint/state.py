"""The state of a run besides the optimizer's: the model's tensors, FP8's scales, random states.

The scales and random states belong to a rank. If the layout differs, they start anew, and the
scales also if the recipe or the length of their histories differs; the weights never depend on
them. They are tensors and plain values only, so that reading a state executes no code.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from moe_parallel.collective_errors import StorageError, exchange
from moe_parallel.config import read_yaml
from moe_parallel.config.message import flag
from moe_parallel.errors import InputError
from moe_parallel.experts.fp8_engine import Fp8Engine
from moe_parallel.model.language_model import Fp8GPTModel
from moe_parallel.training.checkpoint.optimizer import MASTER
from moe_parallel.training.checkpoint.tensors import of_this_rank


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


_KEY = "fp8_state"


def fp8_state_facts(chunks: Sequence[torch.nn.Module]) -> dict[str, int | str] | None:
    """The facts, for a checkpoint's record, that a model must share to load the state."""
    engine = _engine(chunks)
    return None if engine is None else engine.state_facts


def fp8_state(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Content to be written; {} if there is no state."""
    engine = _engine(chunks)
    if engine is None or engine.state_facts is None:
        return {}
    return {_KEY: of_this_rank(_KEY, engine.state())}


def fp8_state_to_read(
    chunks: Sequence[torch.nn.Module], record: Mapping[str, Any]
) -> dict[str, Any]:
    """Content to be read from a checkpoint of this layout; {} if no stored state fits."""
    facts = fp8_state_facts(chunks)
    if facts is None or record.get(_KEY) != facts:
        return {}
    return {_KEY: of_this_rank(_KEY, None)}


def set_fp8_state(chunks: Sequence[torch.nn.Module], loaded: Mapping[str, Any]) -> None:
    """Restore what was read.

    Raises:
        StorageError: the content is of another kind.
    """
    engine = _engine(chunks)
    if engine is None or _KEY not in loaded:
        return
    try:
        engine.load_state(loaded[_KEY])
    except (LookupError, TypeError, RuntimeError) as error:
        reason = type(error).__name__
        raise StorageError(f"its FP8 scales are of another kind ({reason})") from error


def _engine(chunks: Sequence[torch.nn.Module]) -> Fp8Engine | None:
    """The FP8 engine, which all chunks of a rank share."""
    chunk = unwrap_model(list(chunks))[0]
    return chunk.fp8 if isinstance(chunk, Fp8GPTModel) else None


def random_state() -> dict[str, Any]:
    """The state of every generator that training may use on this rank."""
    state: Any = numpy.random.get_state()
    name, keys, *place = state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(numpy.int64)), *place),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned.

    Raises:
        StorageError: `state` is of another kind.
    """
    try:
        name, keys, *place = state["numpy"]  # an array in checkpoints of format 1
        random.setstate(state["python"])
        numpy.random.set_state((name, numpy.asarray(keys).astype(numpy.uint32), *place))
        torch.cuda.set_rng_state(state["cuda"])
        get_cuda_rng_tracker().set_states(state["megatron"])
        torch.set_rng_state(state["torch"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = type(error).__name__
        raise StorageError(f"its random states are of another kind ({reason})") from error
