"""The experts' products in FP8, by the names that Megatron-Core gives its options."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config.option import option


@dataclass(frozen=True)
class Fp8Config:
    """Experts in FP8 through Transformer Engine (docs/fp8.md); scores are not."""

    fp8_format: str | None = option(
        None,
        "compute experts in FP8: e4m3 everywhere, or e5m2 for gradients (hybrid); none: off",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = option(
        "delayed",
        "what a tensor is scaled by before it is rounded: the maxima of passes before (delayed), "
        "its own maximum (tensorwise), or that of each block of 128 values (blockwise)",
        choices=("delayed", "tensorwise", "blockwise"),
    )
    fp8_margin: int = option(0, "delayed: divide scales by 2^margin")
    fp8_amax_history_len: int = option(1, "delayed: passes whose maxima are kept")
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "delayed: scale by the latest of the maxima that are kept, or by the greatest",
        choices=("most_recent", "max"),
    )

    @property
    def multiple(self) -> int:
        """What both sides of every matrix must be a multiple of."""
        return 128 if self.fp8_recipe == "blockwise" else 16
