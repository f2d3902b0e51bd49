"""Weights that `--overlap-param-gather` leaves to the next forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.distributed import DistributedDataParallel


def gather_weights(chunks: Iterable[Any]) -> None:
    """Complete the weights of the model chunks on this rank. Collective.

    After an optimizer step a rank has updated only its share of the weights. With
    --overlap-param-gather the others arrive when the forward pass needs them, so code that reads
    the weights before then calls this function. Without the flag it does nothing.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)
