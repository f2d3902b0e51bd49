"""Routings of unusual shapes, and the tensors on which the operators' tests run."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NOT_CHOSEN = -1
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Relative to float64 on the same inputs, in units of the largest value.
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


@dataclass(frozen=True)
class Routing:
    name: str
    num_experts: int
    experts: np.ndarray  # [tokens, choices]
    pad_rows_per_expert: int | None = None

    def __str__(self) -> str:
        return self.name


def _distinct(tokens: int, choices: int, num_experts: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(num_experts)[:choices] for _ in range(tokens)]
    return np.array(rows, dtype=np.int64).reshape(tokens, choices)


def _without(experts: np.ndarray, left_out: np.ndarray) -> np.ndarray:
    return np.where(left_out, NOT_CHOSEN, experts)


def _first_per_expert(experts: np.ndarray, most: int) -> np.ndarray:
    """Drop the choices beyond a capacity, later tokens first."""
    kept, seen = experts.copy(), {}
    for place in np.ndindex(*experts.shape):
        seen[experts[place]] = seen.get(experts[place], 0) + 1
        if seen[experts[place]] > most:
            kept[place] = NOT_CHOSEN
    return kept


_SOME = _distinct(13, 2, 5)
_WIDE = _distinct(11, 5, 6)
_RANDOM = np.random.default_rng(1).random(_SOME.shape)

ROUTINGS = [
    Routing("plain", 5, _SOME),
    Routing("empty_experts", 9, 2 * _distinct(7, 2, 4)),
    Routing("one_token", 4, _distinct(1, 3, 4)),
    Routing("one_expert", 1, np.zeros((6, 1), dtype=np.int64)),
    Routing("all_to_one", 6, np.full((9, 1), 2, dtype=np.int64)),
    Routing("no_rows", 3, np.full((4, 2), NOT_CHOSEN, dtype=np.int64)),
    Routing("no_tokens", 3, np.zeros((0, 2), dtype=np.int64)),
    Routing("dropped_choices", 5, _without(_SOME, _RANDOM < 0.4)),
    Routing("variable_k", 6, _without(_WIDE, np.arange(5) > np.arange(11)[:, None] % 5)),
    Routing("many_experts", 70, _distinct(41, 8, 70)),
    Routing("many_tokens", 3, _distinct(700, 2, 3)),
    Routing("padded", 5, _SOME, pad_rows_per_expert=11),
    Routing("padded_and_dropped", 5, _first_per_expert(_SOME, 4), pad_rows_per_expert=4),
    Routing("capacity_one", 5, _first_per_expert(_SOME, 1), pad_rows_per_expert=1),
    Routing("capacity_zero", 5, np.full((4, 2), NOT_CHOSEN, dtype=np.int64), pad_rows_per_expert=0),
    Routing("padding_without_tokens", 3, np.zeros((0, 2), dtype=np.int64), pad_rows_per_expert=2),
    Routing("a_thousand_rows_of_one", 2, np.zeros((1100, 1), dtype=np.int64)),
    Routing("half_to_one", 8, np.stack([np.zeros(700), 1 + np.arange(700) % 3], 1).astype(int)),
]
BY_NAME = {routing.name: routing for routing in ROUTINGS}


def random_tensor(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return values.to(device, dtype)


def float64(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def assert_close(
    actual: Tensor, expected: np.ndarray, dtype: torch.dtype, *, rounded: int = 1
) -> None:
    """Equal within the rounding of dtype, relative to the largest expected value.

    `rounded`: 2 if `expected` was computed in this dtype, too.
    """
    assert tuple(actual.shape) == expected.shape
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
    difference = float(np.abs(float64(actual) - expected).max(initial=0.0))
    assert difference <= rounded * ROUNDING[dtype] * scale, f"off by {difference} of {scale}"


def gradients(output: Tensor, upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, upstream)


def transposed_memory(tensor: Tensor) -> Tensor:
    """Equal values; columns are contiguous instead of rows."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def every_second_column(tensor: Tensor) -> Tensor:
    """Equal values, with gaps between the elements of a row."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]


def unaligned(tensor: Tensor) -> Tensor:
    """Equal values; each is one element after the start of a vector or a cache line."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": transposed_memory,
    "gaps": every_second_column,
    "unaligned": unaligned,
}


def error(actual: Tensor, exact: np.ndarray) -> float:
    return float(np.linalg.norm(float64(actual) - exact))


def assert_no_worse_than_twice(native: Tensor, reference: Tensor, exact: np.ndarray) -> None:
    assert error(native, exact) <= 2 * error(reference, exact) + 1e-12
