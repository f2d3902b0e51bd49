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
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from moe_parallel.collective_errors import StorageError, agree, exchange
from moe_parallel.config import read_yaml
from moe_parallel.config.message import flag
from moe_parallel.errors import InputError
from moe_parallel.experts.fp8 import Fp8Engine
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


def set_module_states(
    chunks: Sequence[torch.nn.Module], model: Mapping[str, Any], loaded: Mapping[str, Any]
) -> None:
    """Give the modules their own states, such as Transformer Engine's, besides tensors.

    `model`: `model_tensors` of the chunks; `loaded`: what was read, by its keys.
    """
    for chunk, content in zip(unwrap_model(list(chunks)), model.values(), strict=True):
        states = {
            name: loaded[value.key]
            for name, value in content.items()
            if isinstance(value, ShardedObject) and value.key in loaded
        }
        if states:
            chunk.load_state_dict(states, strict=False)


def check_tensors(
    checkpoint: Path,
    tensors: Sequence[ShardedTensor],
    stored: dict[str, tuple[int, ...]],
    states: Mapping[str, object],
) -> None:
    """Compare the tensors to be read, on any rank, with the stored ones.

    `states`: by flag, the options that decide which numbers move after a step.

    Raises InputError on every rank for the first that is missing, unexpected, or of another shape.
    It names the options of `states` that differ in the checkpoint's config.yaml.
    """
    wanted = {
        tensor.key: (tuple(tensor.global_shape), tensor.allow_shape_mismatch) for tensor in tensors
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
        name = key.removeprefix(MASTER)
        if key not in stored:
            return f"the model has {name}, which the checkpoint lacks"
        found = stored[key]
        if found != shape and not may_differ:
            return f"{name} is {list(found)} in the checkpoint and {list(shape)} here"
    read = {key.removeprefix(MASTER) for key in wanted}
    for key in stored:
        if key not in read and not key.startswith("optimizer."):
            return f"the checkpoint has {key}, which the model lacks"
    return None


_RANDOM, _FP8 = "random_state", "fp8_state"


def fp8_state_facts(chunks: Sequence[torch.nn.Module]) -> dict[str, int | str] | None:
    """The facts, for a checkpoint's record, that a model must share to load FP8's scales."""
    engine = _engine(chunks)
    return None if engine is None else engine.state_facts


def rank_states(chunks: Sequence[torch.nn.Module]) -> list[ShardedObject]:
    """The states of this rank alone, to be written."""
    states, engine = {_RANDOM: random_state()}, _engine(chunks)
    if engine is not None and engine.state_facts is not None:
        states[_FP8] = engine.state()
    return [of_this_rank(key, state) for key, state in states.items()]


def rank_states_to_read(
    chunks: Sequence[torch.nn.Module], record: Mapping[str, Any], *, goes_on: bool
) -> list[ShardedObject]:
    """The states to be read from a checkpoint of this layout, as far as they fit.

    `goes_on`: whether random numbers go on where they were.
    """
    facts = fp8_state_facts(chunks)
    fits = facts is not None and record.get(_FP8) == facts
    keys = [_RANDOM] * goes_on + [_FP8] * fits
    return [of_this_rank(key, None) for key in keys]


def set_rank_states(chunks: Sequence[torch.nn.Module], loaded: Mapping[str, Any]) -> None:
    """Restore those states that were read, by their keys. Collective.

    Raises:
        StorageError: on every rank, if one is of another kind.
    """

    def restore() -> None:
        what, engine = "FP8 scales", _engine(chunks)
        try:
            if engine is not None and _FP8 in loaded:
                engine.load_state(loaded[_FP8])
            what = "random states"
            if _RANDOM in loaded:
                set_random_state(loaded[_RANDOM])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = type(error).__name__
            raise StorageError(f"its {what} are of another kind ({reason})") from error

    agree(restore)


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
    """Restore what `random_state` returned. Raises various errors for a state of another kind."""
    name, keys, *place = state["numpy"]
    random.setstate(state["python"])
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *place))
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    torch.set_rng_state(state["torch"])
