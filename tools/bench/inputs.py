"""The tokens, weights and routing that all contenders of a bench share, from fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.bench.sizes import BenchSize

LEAST_MARGIN = 2e-3  # far above the change of a norm when C is rounded to bf16


@dataclass(frozen=True)
class Draw:
    """Draws tensors of one dtype on one device. Equal seeds give equal tensors."""

    dtype: torch.dtype
    device: str

    def normal(
        self, *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Draw on the CPU, so that the numbers are the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(self.device, dtype or self.dtype)

    def weight(self, *shape: int, seed: int) -> Tensor:
        """A matrix for each expert, [.., in, out], that keeps the size of what it multiplies."""
        return self.normal(*shape, seed=seed, scale=shape[-2] ** -0.5)

    def experts(self, size: BenchSize) -> Tensor:
        """experts_TK: distinct experts for each token, without a pattern."""
        generator = torch.Generator().manual_seed(0)
        scores_TE = torch.rand(size.T, size.n, generator=generator)
        return scores_TE.topk(size.K).indices.to(self.device)

    def probs(self, size: BenchSize) -> Tensor:
        """probs_TK, fp32, with values that are exact in the dtype, because some peers use it."""
        scores_TK = self.normal(size.T, size.K, seed=7, dtype=torch.float32)
        return scores_TK.softmax(-1).to(self.dtype).float()

    def tokens_with_margin(self, size: BenchSize, w_EDR: Tensor) -> Tensor:
        """x_TD whose K largest norms ||x W_down|| are clearly larger than the others.

        Rounding may decide near-ties either way, which is not an error. Without near-ties, every
        contender chooses the same experts.
        """
        w_DER = w_EDR.permute(1, 0, 2).flatten(1).float()
        kept: list[Tensor] = []
        while sum(map(len, kept)) < size.T:
            x_TD = self.normal(size.T, size.d, seed=100 + len(kept))
            kept.append(x_TD[self._margins(x_TD, w_DER, size) > LEAST_MARGIN])
        return torch.cat(kept)[: size.T].clone()

    def _margins(self, x_TD: Tensor, w_DER: Tensor, size: BenchSize) -> Tensor:
        """The relative difference between the K-th norm and the next one: [T]."""
        if size.K == size.n:
            return x_TD.new_full((size.T,), float("inf"))
        chunks = [
            (x_CD.float() @ w_DER).unflatten(1, (size.n, -1)).norm(dim=-1)
            for x_CD in x_TD.split(1024)
        ]
        top_TK = torch.cat(chunks).topk(size.K + 1).values
        return top_TK[:, -2] / top_TK[:, -1] - 1


def leaf(tensor: Tensor) -> Tensor:
    """A leaf tensor with the same values, which requires a gradient."""
    return tensor.detach().requires_grad_()
