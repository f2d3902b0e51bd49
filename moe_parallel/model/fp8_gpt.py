"""Megatron-Core's GPT around experts in FP8."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from moe_parallel.experts.fp8_engine import Fp8Engine


class Fp8GPTModel(GPTModel):
    """A chunk whose forward pass ends with the passes of its experts' scales.

    Its other layers are not Transformer Engine's, so the region means nothing to them.
    """

    def __init__(self, fp8: Fp8Engine, **arguments: Any) -> None:
        """`arguments`: of GPTModel."""
        super().__init__(**arguments)
        self.fp8 = fp8

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self.fp8.model_region():
            output: torch.Tensor = super().forward(*arguments, **named)
        return output
