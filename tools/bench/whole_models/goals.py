"""The goals for whole models on a CPU."""

from __future__ import annotations

from dataclasses import replace

from tools.bench.contender import BOTH
from tools.bench.goal import PEAK, SAVED, SPEED, Goal
from tools.bench.peers.huggingface import model_of
from tools.bench.sizes import GOALS
from tools.bench.whole_models.sizes import SIZES

STOCK = "Megatron GPTModel"
TOPK = "ours, topk"
#: By the length of a sequence: how many times as fast as Megatron-Core's model.
AGAINST_STOCK = {1024: 1.6, 4096: 4.0}
#: (row, AoE, topk of as many parameters, its speed at least)
AUTONOMOUS = (
    ("model with aux loss", "aoe, aux loss, full gradient", "topk, aux loss", 0.97),
    ("model balanced by bias", "aoe, by bias, selected gradient", "topk, by bias", 0.99),
)


def model_goals(dtype: str) -> list[Goal]:
    """The goals for forward and backward passes in `dtype`, for each size of `--sizes goals`."""
    goals = []
    for size in SIZES[GOALS]:
        theirs = f"{model_of(size.n)} grouped_mm"
        plain = Goal("model", BOTH, str(size), dtype, SPEED, 1.2, theirs, TOPK)
        goals += [
            plain,
            replace(plain, bound=AGAINST_STOCK[size.S], other=STOCK),
            replace(plain, figure=SAVED, bound=0.7),
        ]
        for row, aoe, topk, speed in AUTONOMOUS:
            against = replace(plain, op=row, bound=speed, other=topk, contender=aoe)
            goals += [against, replace(against, figure=PEAK, bound=1.0)]
    return goals
