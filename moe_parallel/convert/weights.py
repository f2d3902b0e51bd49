"""Copies the weights of one model into another, by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from moe_parallel.errors import InputError


@torch.no_grad()
def copy_weights(source: Any, target: Any, elsewhere: Collection[str] = ()) -> None:
    """Copy every parameter of `source` to the one of the same name in `target` (complete models).

    `elsewhere`: beginnings of names, in either model, that are converted in another way. Raises
    InputError for any other weight that only one model has, or whose shapes differ.
    """
    theirs, ours = (
        {
            name: parameter
            for name, parameter in model.named_parameters()
            if not name.startswith(tuple(elsewhere))
        }
        for model in (source, target)
    )
    for name in theirs.keys() | ours.keys():
        if name not in theirs or name not in ours:
            where = "the new model" if name not in theirs else "the checkpoint"
            raise InputError(f"--to: only {where} has the weight {name}: leave out what adds it")
        if theirs[name].shape != ours[name].shape:
            raise InputError(
                f"--to: {name} is {list(theirs[name].shape)} in the checkpoint and "
                f"{list(ours[name].shape)} in the new model: leave the sizes as they are"
            )
        ours[name].copy_(theirs[name])
