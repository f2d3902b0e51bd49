"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.section import Section
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW and Megatron-Core's learning-rate schedule."""

    lr: float = option(3e-4, "peak learning rate", least=0, most=1_000)
    min_lr: float = option(3e-5, "learning rate at the end of the decay", least=0)
    lr_warmup_iters: int = option(10, "number of iterations of linear warm-up from 0", least=0)
    lr_decay_iters: int | None = option(
        None, "iteration at which --min-lr is reached; none: --train-iters", least=1
    )
    lr_decay_style: str = option(
        "cosine",
        "shape of the decay (WSD: warm-up, stable, decay)",
        choices=("cosine", "linear", "constant", "WSD"),
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "WSD: number of iterations of the final decay; none: a tenth of the decay iterations",
        least=1,
    )
    weight_decay: float = option(
        0.1,
        "decoupled weight decay. As in Megatron-LM, weights of one axis are exempt: norms, the "
        "biases of attention, the b of routing_free and the scores of AoE's free experts. All "
        "others decay, also embedding, output layer, router and W_down",
        least=0,
    )
    adam_beta1: float = option(0.9, "decay rate of Adam's first moment", least=0, below=1)
    adam_beta2: float = option(0.95, "decay rate of Adam's second moment", least=0, below=1)
    adam_eps: float = option(1e-8, "Adam's epsilon", above=0)
    clip_grad: float = option(
        1.0, "maximum global gradient norm; 0: no clipping", least=0, most=1e30
    )

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.min_lr > self.lr:
            raise InputError(
                f"--min-lr is {self.min_lr}, above --lr {self.lr}: choose at most --lr"
            )
        decay_iters = self.lr_decay_iters or config.training.train_iters
        if self.lr_warmup_iters >= decay_iters:
            raise InputError(
                f"--lr-warmup-iters is {self.lr_warmup_iters}: it must be below the "
                f"{decay_iters} iterations of the decay (--lr-decay-iters or --train-iters)"
            )
        wsd = self.lr_wsd_decay_iters
        if wsd is not None and wsd > decay_iters - self.lr_warmup_iters:
            raise InputError(
                f"--lr-wsd-decay-iters is {wsd}: it must be at most the "
                f"{decay_iters - self.lr_warmup_iters} iterations that follow the warm-up"
            )
