"""The subject of a measurement: several implementations of the same work, and its amount.

Bench        one operator, size and dtype: contenders and measures
Contender    one implementation: a forward pass, and the tensors to differentiate
Absent       a peer that cannot take part, and the reason
Measure      the pass that is timed, and the work that it needs at least
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from tools.bench.sizes import BenchSize

if TYPE_CHECKING:
    from tools.bench.whole_models.sizes import ModelSize

FORWARD, BACKWARD, BOTH, STEP = "forward", "backward", "forward+backward", "step"
OURS = "ours"
Values = dict[str, Tensor]
Forward = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Moved:
    """Work that moves bytes: the least that is read and written. Its ceiling is a copy."""

    bytes: int

    @property
    def amount(self) -> float:
        return float(self.bytes)

    unit = "GB/s"
    ceiling = "copy"


@dataclass(frozen=True)
class Products:
    """Work that multiplies: dense products (rows, inner, columns). Its ceiling is these products,
    one after the other."""

    shapes: tuple[tuple[int, int, int], ...]

    @property
    def amount(self) -> float:
        return 2.0 * sum(m * k * n for m, k, n in self.shapes)

    unit = "GFLOP/s"
    ceiling = "dense GEMM"

    def with_gradients(self) -> Products:
        """The same with both gradients of each product, each of which costs as much as it."""
        both = [((m, n, k), (k, m, n)) for m, k, n in self.shapes]
        return Products(self.shapes + tuple(shape for pair in both for shape in pair))


@dataclass(frozen=True)
class Measure:
    timed: str  # FORWARD, BACKWARD, BOTH or STEP
    work: Moved | Products


@dataclass(frozen=True)
class BenchContender:
    """One way to do the work of a bench.

    leaves: the tensors whose gradients are computed, by name.
    weights: the names of those leaves that are parameters, not activations.
    upstream: the gradients of the first outputs; empty if nothing is differentiated.
    canonical: converts gradients (by leaf) to the layout of our own operator.
    answer: contenders with the same answer must agree; another model as a yardstick has its own.
    unordered: the outputs of choices whose order may differ, because it is that of near-ties.
    step: a step of the optimizer of a whole model.
    before_step: makes the gradients of a step; it returns no arguments for it.
    """

    name: str
    forward: Forward
    leaves: Values = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    upstream: tuple[Tensor, ...] = ()
    canonical: Callable[[Values], Values] = lambda gradients: gradients
    answer: str = ""
    unordered: frozenset[str] = frozenset()
    step: Callable[[], object] = lambda: None
    before_step: Callable[[], Sequence[Any]] = tuple

    def backward(self, outputs: Sequence[Tensor]) -> Values:
        differentiated = outputs[: len(self.upstream)]
        gradients = torch.autograd.grad(differentiated, list(self.leaves.values()), self.upstream)
        return dict(zip(self.leaves, gradients, strict=True))

    def run(self) -> tuple[Sequence[Tensor], Values]:
        """Outputs and gradients. Without `upstream` there are no gradients."""
        outputs = self.forward()
        return outputs, self.backward(outputs) if self.upstream else {}

    def values(self) -> Values:
        """The values on which contenders must agree, in one layout and detached."""
        outputs, gradients = self.run()
        named = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
        named |= {name: named[name].sort(-1).values for name in self.unordered}
        return named | {f"gradient of {n}": g for n, g in self.canonical(gradients).items()}


@dataclass(frozen=True)
class Absent:
    name: str
    reason: str


@dataclass(frozen=True)
class Bench:
    """The contenders of a bench. Peers and further variants of ours are compared with our first."""

    op: str
    size: BenchSize | ModelSize
    dtype: torch.dtype
    ours: Sequence[BenchContender]
    peers: Sequence[BenchContender | Absent]
    measures: tuple[Measure, ...]


class Unavailable(Exception):
    """Raised by a peer that cannot take part in a bench. The message is the reason."""


def peer_package(name: str, like: Tensor | None = None) -> ModuleType:
    """A module of a peer's package. Raises Unavailable, or the error of a broken installation.

    `like`: a tensor of the bench, for a package that needs a GPU.
    """
    if like is not None and not like.is_cuda:
        raise Unavailable("needs a CUDA GPU")
    try:
        return import_optional(name, "this peer")
    except InputError as error:
        raise Unavailable(str(error)) from error


def invite(name: str, build: Callable[[], BenchContender]) -> BenchContender | Absent:
    """The peer that `build` returns, or the reason for its absence.

    Another package may raise any error, on import or on construction.
    """
    try:
        return build()
    except Unavailable as error:
        return Absent(name, str(error))
    except Exception as error:
        return Absent(name, one_line(error))


def one_line(error: BaseException) -> str:
    """The first line of the error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
