"""The tokens, weights and routing that all contenders of a bench share, from fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, stack

from tools.bench.measurement import BenchContender, Forward, Values
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


WEIGHTS = frozenset({"w_gate_up", "w_out"})


@dataclass(frozen=True, eq=False)
class RoutedLayerWork:
    """One set of tokens, weights, probs and choices, and the gradient of the output.

    The router's small product is left out, because selection is not compared. A contender takes
    weights in the layout here, or in that of torch.nn.Linear; both are contiguous.
    """

    size: BenchSize
    x_TD: Tensor
    probs_TK: Tensor  # fp32
    experts_TK: Tensor
    w_gate_up_ED2F: Tensor  # gate first
    w_out_EFD: Tensor
    dy_TD: Tensor

    @classmethod
    def drawn(cls, size: BenchSize, draw: Draw) -> RoutedLayerWork:
        return cls(
            size=size,
            x_TD=leaf(draw.normal(size.T, size.d, seed=1)),
            probs_TK=leaf(draw.probs(size)),
            experts_TK=draw.experts(size),
            w_gate_up_ED2F=leaf(draw.weight(size.n, size.d, 2 * size.f, seed=2)),
            w_out_EFD=leaf(draw.weight(size.n, size.f, size.d, seed=3)),
            dy_TD=draw.normal(size.T, size.d, seed=4),
        )

    @cached_property
    def linear_gate_up_E2FD(self) -> Tensor:
        return leaf(self.w_gate_up_ED2F.detach().transpose(1, 2).contiguous())

    @cached_property
    def linear_out_EDF(self) -> Tensor:
        return leaf(self.w_out_EFD.detach().transpose(1, 2).contiguous())

    def contender(self, name: str, forward: Forward) -> BenchContender:
        """A contender that takes the weights in the layout here."""
        weights = {"w_gate_up": self.w_gate_up_ED2F, "w_out": self.w_out_EFD}
        leaves = {"x": self.x_TD, "probs": self.probs_TK} | weights
        return BenchContender(name, forward, leaves, WEIGHTS, (self.dy_TD,))

    def linear_contender(
        self,
        name: str,
        forward: Forward,
        w_gate_up_E2FD: Tensor,
        w_out_EDF: Tensor,
        probs_TK: Tensor | None = None,
    ) -> BenchContender:
        """A contender with stacked weights in the layout of torch.nn.Linear."""
        probs_TK = self.probs_TK if probs_TK is None else probs_TK
        weights = {"w_gate_up": w_gate_up_E2FD, "w_out": w_out_EDF}
        leaves = {"x": self.x_TD, "probs": probs_TK} | weights

        def canonical(gradients: Values) -> Values:
            return gradients | {w: gradients[w].transpose(1, 2) for w in WEIGHTS}

        return BenchContender(name, forward, leaves, WEIGHTS, (self.dy_TD,), canonical)

    def matrices_contender(
        self, name: str, forward: Forward, gate_up: Sequence[Tensor], out: Sequence[Tensor]
    ) -> BenchContender:
        """A contender with two matrices per expert, in the layout of torch.nn.Linear."""
        named = {f"w_gate_up {e}": w for e, w in enumerate(gate_up)}
        named |= {f"w_out {e}": w for e, w in enumerate(out)}

        def canonical(gradients: Values) -> Values:
            def stacked(weight: str) -> Tensor:
                return stack([gradients[f"{weight} {e}"].t() for e in range(self.size.n)])

            return {name: gradients[name] for name in ("x", "probs")} | {
                weight: stacked(weight) for weight in sorted(WEIGHTS)
            }

        leaves = {"x": self.x_TD, "probs": self.probs_TK} | named
        return BenchContender(name, forward, leaves, frozenset(named), (self.dy_TD,), canonical)
