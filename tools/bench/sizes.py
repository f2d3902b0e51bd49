"""The measured sizes: `small` for a quick check, `goals` for docs/performance, `erc` for the
layer in which the paper of the coupling loss reports what AoE costs (docs/papers.md).

Of whole models: `small`, `goals`, `gpu`, `transformers`, and three curves."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tools.bench.measurement import Products

SMALL, GOALS, ERC = "small", "goals", "erc"


@dataclass(frozen=True)
class BenchSize:
    """A size, with the letters of the AoE paper and docs/performance/README.md; 0: not used."""

    T: int = 0  # tokens
    d: int = 0  # model width
    n: int = 0  # experts
    K: int = 0  # choices per token
    f: int = 0  # width of an expert
    l: int = 0  # low-rank size (d_low) # noqa: E741

    @property
    def rows(self) -> int:
        return self.T * self.K

    @property
    def wide(self) -> int:
        """d_wide of an AoE expert with as many parameters as one of width f, up to rounding.

        It is a multiple of 64, like the widths of models: products of odd widths are slower.
        """
        exact = (3 * self.d * self.f - self.d * self.l) / (2 * self.d + self.l)
        return max(round(exact / 64), 1) * 64

    def __str__(self) -> str:
        letters = [field.name for field in fields(self)]
        return " ".join(f"{a}={getattr(self, a)}" for a in letters if getattr(self, a))


_SMALL = BenchSize(T=512, d=128, n=8, K=2)
_SMALL_FINE = BenchSize(T=256, d=128, n=16, K=4, f=64)
_COARSE = BenchSize(T=4096, d=768, n=8, K=2, f=3072)
_FINE = BenchSize(T=2048, d=768, n=64, K=8, f=384)
_MOVED = BenchSize(T=16384, d=768, n=8, K=2)

_ATTENTION = (BenchSize(T=1024, d=512), BenchSize(T=4096, d=512))  # on the CPU only

_GPU_MOVED = BenchSize(T=16384, d=2048, n=64, K=8)
_GPU_COARSE = BenchSize(T=8192, d=4096, n=8, K=2, f=14336)
_GPU_FINE = BenchSize(T=16384, d=2048, n=64, K=8, f=1024)
_GPU_PAPER = BenchSize(T=16384, d=768, n=8, K=2, f=3072)

SIZES: dict[tuple[str, str], dict[str, tuple[BenchSize, ...]]] = {
    (SMALL, "any"): {
        "routing_map": (_SMALL,),
        "permute": (_SMALL,),
        "unpermute": (_SMALL,),
        "grouped_gemm": (replace(_SMALL, f=256),),
        "swiglu": (replace(_SMALL, f=256),),
        "norm_topk": (replace(_SMALL, l=64),),
        "expert_merge": (BenchSize(T=16, d=128, n=8, f=256),),
        "routed_layer": (replace(_SMALL, f=256), _SMALL_FINE),
        "aoe_layer": (replace(_SMALL, f=256, l=64),),
    },
    (ERC, "any"): {"aoe_layer": (BenchSize(T=2048, d=1536, n=64, K=8, f=768, l=512),)},
    (GOALS, "cpu"): {
        "attention": _ATTENTION,
        "permute": (_MOVED,),
        "unpermute": (_MOVED,),
        "routed_layer": (_COARSE, _FINE),
        "aoe_layer": tuple(replace(_COARSE, l=low) for low in (64, 128, 256, 512)),
    },
    (GOALS, "cuda"): {
        "routing_map": (_GPU_MOVED,),
        "permute": (_GPU_MOVED,),
        "unpermute": (_GPU_MOVED,),
        "grouped_gemm": (_GPU_COARSE, _GPU_FINE),
        "swiglu": (_GPU_FINE,),
        "norm_topk": (
            replace(_GPU_FINE, f=0, l=256),
            *(replace(_GPU_PAPER, f=0, l=low) for low in (64, 128, 256, 512)),
        ),
        "routed_layer": (_GPU_PAPER, _GPU_FINE),
        "aoe_layer": (
            *(replace(_GPU_PAPER, l=low) for low in (64, 128, 256, 512)),
            replace(_GPU_FINE, l=256),
        ),
    },
}
SIZES[SMALL, "cpu"] = SIZES[SMALL, "any"] | {"attention": _ATTENTION[:1]}


def sizes_of(name: str, device: str) -> dict[str, tuple[BenchSize, ...]]:
    """The sizes of each op, in the order in which they are measured."""
    return SIZES.get((name, device)) or SIZES[(name, "any")]


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


GPU, OF_TRANSFORMERS = "gpu", "transformers"

_TWO_OF_1024 = ModelSize()
_ONE_OF_4096 = ModelSize(layers=1, B=1, S=4096)

MODEL_SIZES: dict[str, tuple[ModelSize, ...]] = {
    SMALL: (ModelSize(d=128, f=128, S=128, V=512),),
    GOALS: (_TWO_OF_1024, _ONE_OF_4096),
    # 0.56 B weights. All contenders of a row together need about 40 GB.
    GPU: (ModelSize(d=2048, n=64, K=8, f=512, S=2048, B=4, V=32000, readable_widths=True),),
    # Layers enough, or a vocabulary so small, that most of the time is the experts'.
    OF_TRANSFORMERS: (
        ModelSize(layers=4, B=1),
        ModelSize(d=768, n=64, K=8, f=384, B=1, V=4096),  # each contender's gradients are kept
    ),
    "sequence": tuple(replace(_ONE_OF_4096, S=512 << i) for i in range(5)),
    # Equal FLOPs: K experts of width f do the same work for a token.
    "experts": tuple(replace(_TWO_OF_1024, n=8 << i, K=1 << i, f=1024 >> i) for i in range(5)),
    "micro-batch": tuple(replace(_TWO_OF_1024, S=512, B=1 << i) for i in range(5)),
}
