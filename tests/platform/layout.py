"""The parallel layouts of the stock model in these tests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, and every other difference from plain fp32 training on `world` ranks."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    distributed_optimizer: bool = False
    bf16: bool = False
    recompute: bool = False
    dropout: float = 0.0
    tied: bool = False
