"""Comparison of two checkpoints, tensor by tensor and to the bit, on one process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_parallel.training.checkpoint.optimizer import MASTER, MOMENTS, STATE_PREFIX
from moe_parallel.training.checkpoint.whole import read_in_groups, tensor_entries

COMPARED_AT_ONCE = 2**22  # values
_PARTS = ("embedding.", "decoder.layers.", "decoder.", "output_layer.")
_STATES = ("", MASTER.removeprefix(STATE_PREFIX).rstrip("."), *MOMENTS)


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both checkpoints, and how it differs."""

    key: str
    how: str


@dataclass(frozen=True)
class TensorComparison:
    """equal: the number of tensors that are the same to the bit."""

    equal: int
    differences: list[Difference]  # in the order of the model's layers


def compare(one: Path, other: Path) -> TensorComparison:
    """Compares all tensors of two checkpoints: weights, Adam's moments, and master weights.

    The random states are not compared: each rank has its own. Two groups of tensors are in memory
    at a time. Raises StorageError if a file cannot be read.
    """
    first, second = tensor_entries(one), tensor_entries(other)
    differences = []
    for key in first.keys() ^ second.keys():
        where = one if key in first else other
        differences.append(Difference(key, f"only in {where}"))
    shared = []
    for key in first.keys() & second.keys():
        kinds = [f"{_name(e.properties.dtype)} {list(e.size)}" for e in (first[key], second[key])]
        if kinds[0] == kinds[1]:
            shared.append(key)
        else:
            differences.append(Difference(key, f"{kinds[0]} and {kinds[1]}"))
    equal = 0
    for values, others in read_in_groups(shared, first, one, other):
        found = [
            Difference(key, how)
            for key in values
            if (how := how_values_differ(values[key], others[key]))
        ]
        equal += len(values) - len(found)
        differences += found
    differences.sort(key=lambda difference: place_in_model(difference.key))
    return TensorComparison(equal, differences)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def how_values_differ(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """How the values differ; None: they are the same to the bit, also if they are NaN."""
    count, largest = 0, 0.0
    bytes_of_value = one.element_size()
    for a, b in zip(*(x.reshape(-1).split(COMPARED_AT_ONCE) for x in (one, other)), strict=True):
        differs = (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, bytes_of_value).any(1)
        if differs.any():
            count += int(differs.sum())
            apart = (a[differs].double() - b[differs].double()).abs()
            largest = max(largest, apart.nan_to_num(0, posinf=0).max().item())
    if count == 0:
        return None
    return f"{count:,} of {one.numel():,} values, largest difference {largest:.2e}"


def place_in_model(key: str) -> tuple[int, list[tuple[bool, int, str]], int]:
    """A key for sorting in the order in which the model computes: embedding, layers, final norm,
    output layer. The optimizer state of a weight follows the weight."""
    state, weight = "", key
    if key.startswith(STATE_PREFIX):
        state, _, weight = key.removeprefix(STATE_PREFIX).partition(".")
    part = next((i for i, part in enumerate(_PARTS) if weight.startswith(part)), len(_PARTS))
    # In the alphabet, too, `attention` and `input_layernorm` come before `mlp`.
    return part, _natural(weight.replace(".self_attention.", ".attention.")), _STATES.index(state)


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """A key for sorting in which layer 10 comes after layer 9."""
    words = re.split(r"(\d+)", key)
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words]
