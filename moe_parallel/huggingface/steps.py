"""The tensors of an exported model: which tensors of a checkpoint each is made of, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moe_parallel.huggingface.places import TensorPlace, TensorShape

Tensors = Iterable[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Some tensors of a checkpoint, read together, and those of the exported model made of them."""

    keys: tuple[str, ...]  # of the checkpoint's tensors
    shapes: tuple[TensorShape, ...]  # of these tensors
    results: tuple[tuple[str, TensorShape], ...]  # name and shape of each result, in order
    make: Callable[..., Tensors]  # from the tensors to the results, in order
    always_fp32: bool = False  # whatever the dtype of the export


def plain_steps(places: Iterable[TensorPlace]) -> list[Step]:
    """The steps of a plain architecture. Each tensor of the checkpoint is read once."""
    by_key: dict[str, list[TensorPlace]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    return [_of_places(parts) for parts in by_key.values()]


def _of_places(places: Sequence[TensorPlace]) -> Step:
    def make(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for place in places:
            part = tensor
            for axis, (offset, size) in enumerate(zip(place.offset, place.sizes, strict=True)):
                part = part.narrow(axis, offset, size)
            yield from place.form.split(part)

    results = [pair for place in places for pair in zip(place.names, place.shapes, strict=True)]
    return Step((places[0].key,), (places[0].shape,), tuple(results), make)


def one_step(
    key: str,
    shape: TensorShape,
    name: str,
    result: TensorShape,
    form: Callable[..., torch.Tensor],
    always_fp32: bool = False,
) -> Step:
    """A step from one tensor to one."""
    return Step((key,), (shape,), ((name, result),), lambda x: [form(x)], always_fp32)


def same_step(key: str, name: str, *shape: int, always_fp32: bool = False) -> Step:
    """A step that changes nothing."""
    return one_step(key, shape, name, shape, lambda x: x, always_fp32)
