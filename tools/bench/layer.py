"""A routed layer with given routing: the input of every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, stack

from tools.bench.contender import BenchContender, Forward, Values
from tools.bench.inputs import Draw, leaf
from tools.bench.sizes import BenchSize

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
        leaves = {
            "x": self.x_TD,
            "probs": self.probs_TK,
            "w_gate_up": self.w_gate_up_ED2F,
            "w_out": self.w_out_EFD,
        }
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
        leaves = {
            "x": self.x_TD,
            "probs": self.probs_TK if probs_TK is None else probs_TK,
            "w_gate_up": w_gate_up_E2FD,
            "w_out": w_out_EDF,
        }

        def canonical(gradients: Values) -> Values:
            return gradients | {w: gradients[w].transpose(1, 2) for w in WEIGHTS}

        return BenchContender(name, forward, leaves, WEIGHTS, (self.dy_TD,), canonical)

    def matrices_contender(
        self,
        name: str,
        forward: Forward,
        gate_up: Sequence[Tensor],
        out: Sequence[Tensor],
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
