"""The measured models: `small` for a look, `goals` for docs/performance, `gpu`, and three
curves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tools.bench.contender import Products
from tools.bench.sizes import GOALS, SMALL

HEAD_WIDTH = 64


@dataclass(frozen=True)
class ModelSize:
    """A language model with experts in every layer, and its micro-batch; the letters are those of
    docs/performance/README.md. The vocabulary has an input and an output matrix."""

    layers: int = 2
    d: int = 512  # model width
    n: int = 8  # experts
    K: int = 2  # choices per token
    f: int = 1024  # width of an expert
    S: int = 1024  # tokens of a sequence
    B: int = 2  # sequences
    V: int = 8192  # vocabulary
    readable_widths: bool = False  # AoE's d_wide is a multiple of 8, for tensor cores

    @property
    def heads(self) -> int:
        return max(self.d // HEAD_WIDTH, 2)

    @property
    def key_value_heads(self) -> int:
        return self.heads // 2

    @property
    def tokens(self) -> int:
        return self.B * self.S

    def products(self) -> Products:
        """The dense products of a forward pass, one after the other.

        Attention's scores count for all pairs below the diagonal, as one product of half of S.
        """
        t, d, h = self.tokens, self.d, self.d // self.heads
        qkv = (t, d, (self.heads + 2 * self.key_value_heads) * h)
        pairs = [(self.S, h, self.S // 2), (self.S, self.S // 2, h)] * (self.heads * self.B)
        rows = t * self.K
        layer = [qkv, *pairs, (t, d, d), (t, d, self.n), (rows, d, 2 * self.f), (rows, self.f, d)]
        return Products((*layer * self.layers, (t, d, self.V)))

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, d={self.d} n={self.n} K={self.K} f={self.f} V={self.V}, "
            f"{self.B} x {self.S} tokens"
        )


GPU = "gpu"

_TWO_OF_1024 = ModelSize()
_ONE_OF_4096 = ModelSize(layers=1, B=1, S=4096)

SIZES: dict[str, tuple[ModelSize, ...]] = {
    SMALL: (ModelSize(d=128, f=128, S=128, V=512),),
    GOALS: (_TWO_OF_1024, _ONE_OF_4096),
    # 0.56 B weights. All contenders of a row together need about 40 GB.
    GPU: (ModelSize(d=2048, n=64, K=8, f=512, S=2048, B=4, V=32000, readable_widths=True),),
    "sequence": tuple(replace(_ONE_OF_4096, S=512 << i) for i in range(5)),
    # Equal FLOPs: K experts of width f do the same work for a token.
    "experts": tuple(replace(_TWO_OF_1024, n=8 << i, K=1 << i, f=1024 >> i) for i in range(5)),
    "micro-batch": tuple(replace(_TWO_OF_1024, S=512, B=1 << i) for i in range(5)),
}
