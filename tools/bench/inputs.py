"""Tokens, weights and routing that all contenders of a bench share, drawn from fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.bench.sizes import Size

LEAST_MARGIN = 5e-3  # between the norms of the last chosen and the first unchosen expert


@dataclass(frozen=True)
class Draw:
    """Draws tensors of one dtype on one device; every draw of a seed is the same."""

    dtype: torch.dtype
    device: str

    def normal(
        self, *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Drawn on the CPU, so that the numbers are the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(self.device, dtype or self.dtype)

    def weight(self, *shape: int, seed: int) -> Tensor:
        """A matrix for each expert, [.., in, out], that keeps the size of what it multiplies."""
        return self.normal(*shape, seed=seed, scale=shape[-2] ** -0.5)

    def experts(self, size: Size) -> Tensor:
        """experts_TK: distinct experts for each token, without a pattern."""
        generator = torch.Generator().manual_seed(0)
        scores_TE = torch.rand(size.T, size.n, generator=generator)
        return scores_TE.topk(size.K).indices.to(self.device)

    def gates(self, size: Size) -> Tensor:
        """gates_TK, fp32, summing to 1, of values that the dtype has too: some peers take those."""
        scores_TK = self.normal(size.T, size.K, seed=7, dtype=torch.float32)
        return scores_TK.softmax(-1).to(self.dtype).float()

    def tokens_with_margin(self, size: Size, w_EDR: Tensor) -> Tensor:
        """x_TD whose K largest norms ||x W_e|| stand clear of the others.

        Near-ties may fall either way in any precision, and a token that goes elsewhere is no
        error; without them every contender chooses the same experts.
        """
        candidates = self.normal(4 * size.T, size.d, seed=1)
        if size.K == size.n:
            return candidates[: size.T].clone()
        w_DER = w_EDR.permute(1, 0, 2).flatten(1).float()
        kept: list[Tensor] = []
        for x_TD in candidates.split(1024):
            norms_TE = (x_TD.float() @ w_DER).unflatten(1, (size.n, -1)).norm(dim=-1)
            top = norms_TE.topk(size.K + 1).values
            kept.append(x_TD[top[:, -2] > top[:, -1] * (1 + LEAST_MARGIN)])
        x_TD = torch.cat(kept)[: size.T].clone()
        assert x_TD.size(0) == size.T, "too few tokens are clear of near-ties: draw more"
        return x_TD


def leaf(tensor: Tensor) -> Tensor:
    """The same values, to be differentiated."""
    return tensor.detach().requires_grad_()
