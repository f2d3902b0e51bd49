"""Megatron-Core's GPT model with experts in FP8."""

from __future__ import annotations

from typing import Any

import torch

from moe_parallel.experts.fp8_engine import Fp8Engine
from moe_parallel.model.language_model import LanguageModel


class Fp8GPTModel(LanguageModel):
    """A model chunk whose forward pass is one FP8 region, if its experts' scales need it.

    Its other layers are not Transformer Engine's, so the FP8 region does not affect them.
    """

    def __init__(self, fp8: Fp8Engine, **arguments: Any) -> None:
        """`arguments`: of LanguageModel."""
        super().__init__(**arguments)
        self.fp8 = fp8

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self.fp8.model_region():
            output: torch.Tensor = super().forward(*arguments, **named)
        return output
