"""The state of experts in FP8 in a checkpoint: delayed scaling's scales and histories of maxima.

It belongs to a rank, as random states do. If the layout, the recipe or the length of the histories
differs, or the experts were not in FP8, the scales start anew; the weights never depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from moe_parallel.collective_errors import StorageError
from moe_parallel.experts.fp8 import Fp8Engine
from moe_parallel.model.language_model import Fp8GPTModel
from moe_parallel.training.checkpoint.tensors import of_this_rank

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
