"""The tokens to which a conversion is fitted, and the inputs of a layer for these tokens.

Shape suffixes: B sequences, S tokens of a sequence, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_parallel.errors import InputError

Batches = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Calibration:
    """Random training text in two parts: one for the fit, and one held out for measurements."""

    fitted: Batches  # tokens and position_ids, int64 [B, S]
    held_out: Batches

    @property
    def tokens(self) -> tuple[int, int]:
        """The number of tokens of each part."""
        first, second = (
            sum(batch["tokens"].numel() for batch in batches)
            for batches in (self.fitted, self.held_out)
        )
        return first, second


def draw_calibration(
    dataset: Any, samples: int, batch_size: int, seed: int, device: torch.device
) -> Calibration:
    """Draw `samples` samples of a dataset for the fit, and a third as many others to measure.

    Raises InputError if the dataset has too few.
    """
    held_out = -(-samples // 3)
    if samples < 1:
        raise InputError(
            f"--calibration-samples is {samples}: the norms are fitted to training text, so draw "
            "at least 1"
        )
    if samples + held_out > len(dataset):
        most = max(n for n in range(len(dataset) + 1) if n + -(-n // 3) <= len(dataset))
        fewer = f"draw at most {most}, or " if most else ""
        raise InputError(
            f"--calibration-samples is {samples}, and {held_out} more are held out, but the "
            f"training text has {len(dataset)}: {fewer}name more text by --data-path"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(dataset), generator=generator)[: samples + held_out].tolist()

    def batches(numbers: list[int]) -> Iterator[dict[str, torch.Tensor]]:
        for start in range(0, len(numbers), batch_size):
            some = [dataset[number] for number in numbers[start : start + batch_size]]
            yield {
                name: torch.stack([sample[name] for sample in some]).to(device)
                for name in ("tokens", "position_ids")
            }

    return Calibration(list(batches(drawn[:samples])), list(batches(drawn[samples:])))


@torch.no_grad()
def inputs_of(layer: torch.nn.Module, model: Any, batches: Batches) -> torch.Tensor:
    """The input of a feed-forward layer when a model computes the batches: [T, D]."""
    seen: list[torch.Tensor] = []

    def note(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        seen.append(arguments[0].detach().flatten(0, 1))

    model.eval()
    handle = layer.register_forward_pre_hook(note)
    try:
        for batch in batches:
            model(batch["tokens"], batch["position_ids"], None)
    finally:
        handle.remove()
    return torch.cat(seen)
