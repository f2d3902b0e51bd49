"""The goals for whole models on a CPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tools.bench.contender import BOTH
from tools.bench.goal import PEAK, SAVED, SPEED, TOKEN_SAVED, TOKEN_TIME, Goal, GrowthGoal
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
#: By the name of a curve: (letter of its sizes, one of them, the one to compare with, figure, at
#: most)
GROWTH = {
    "sequence": ("S", 8192, 1024, TOKEN_SAVED, 1.05),
    "experts": ("n", 128, 8, TOKEN_TIME, 1.3),
}


def model_goals(dtype: str, sizes: Collection[str] = (GOALS,)) -> list[Goal]:
    """The goals for forward and backward passes in `dtype`, for the sizes named in `--sizes`."""
    goals: list[Goal] = _goals_of_sizes(dtype) if GOALS in sizes else []
    return goals + [_goal_of_curve(name, dtype) for name in GROWTH if name in sizes]


def _goal_of_curve(name: str, dtype: str) -> GrowthGoal:
    letter, large, small, figure, bound = GROWTH[name]
    by_letter = {getattr(size, letter): size for size in SIZES[name]}
    after, before = by_letter[large], by_letter[small]
    return GrowthGoal(
        op="model",
        timed=BOTH,
        size=str(after),
        dtype=dtype,
        figure=figure,
        bound=bound,
        other=TOPK,
        contender=TOPK,
        before=str(before),
        tokens=after.tokens,
        before_tokens=before.tokens,
    )


def _goals_of_sizes(dtype: str) -> list[Goal]:
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
