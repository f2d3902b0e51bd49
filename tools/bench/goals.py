"""The goals, each for one row, and the verdicts on a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from tools.bench.contender import BACKWARD, BOTH, FORWARD, OURS
from tools.bench.peers.huggingface import model_of
from tools.bench.peers.torch_ops import GROUPED_MM, LIST_OF_EXPERTS
from tools.bench.peers.transformer_engine import GROUPED_LINEAR, PERMUTE, UNPERMUTE
from tools.bench.results import Place, Result, Row, times_as_fast
from tools.bench.rows import layers
from tools.bench.sizes import GOALS, Size, sizes_of

SHARE, SPEED, SAVED = "of the ceiling", "as fast as", "the saved bytes of"


@dataclass(frozen=True)
class Goal(Place):
    """On one row, `figure` of `contender` must be at least (for SAVED at most) `bound`.

    figure: SHARE, or SPEED or SAVED against the contender `other` of the same row.
    """

    figure: str
    bound: float
    other: str = ""
    contender: str = OURS

    @property
    def sign(self) -> str:
        return "<=" if self.figure == SAVED else ">="

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.figure == SHARE else f"{value:.3f}x"


@dataclass(frozen=True)
class Verdict:
    """value: the measured value; None, with the reason, if there is none."""

    goal: Goal
    value: float | None = None
    reason: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        if self.goal.figure == SAVED:
            return self.value <= self.goal.bound
        return self.value >= self.goal.bound

    def __str__(self) -> str:
        """The verdict without the row, which `format_verdicts` names."""
        goal = self.goal
        figure = f"{goal.figure} {goal.other}".rstrip()
        bound = f"{goal.sign} {goal.shown(goal.bound)}"
        if self.value is None:
            return f"{'not measured':<14}{goal.contender}: {figure} {bound}: {self.reason}"
        shown = f"{goal.contender}: {goal.shown(self.value)} {figure} (goal {bound}"
        if self.met:
            return f"{'met':<14}{shown})"
        off = 100 * (self.value / goal.bound - 1)
        return f"{'missed':<14}{shown}: {abs(off):.1f} % {'over' if off > 0 else 'short'})"


def format_verdicts(verdicts: Iterable[Verdict]) -> str:
    """The verdicts on each row under its title."""
    lines = []
    for title, on_row in groupby(verdicts, key=lambda verdict: verdict.goal.title):
        lines += [f"  {title}", *(f"    {verdict}" for verdict in on_row)]
    return "\n".join(lines)


def judge(goal: Goal, rows: Iterable[Row]) -> Verdict:
    row = next((row for row in rows if row.key == goal.key), None)
    if row is None:
        return Verdict(goal, reason="the row was not part of this run")
    one = row.result(goal.contender)
    other = row.result(goal.other) if goal.other else row.ceiling
    for name, result in ((goal.contender, one), (goal.other, other)):
        if result is None:
            return Verdict(goal, reason=f"{name} took no part")
        if result.absent is not None:
            return Verdict(goal, reason=f"{name} is absent: {result.absent}")
        if result.differs is not None:
            return Verdict(goal, reason=f"{name} DIFFERS: {result.differs}")
    return Verdict(goal, _figure(goal.figure, one, other))


def _figure(figure: str, one: Result, other: Result) -> float:
    if figure == SAVED:
        return one.saved_bytes / other.saved_bytes
    return times_as_fast(one, other)  # a share is the speed against the ceiling


def goals_of(device: str) -> list[Goal]:
    """The project's goals for operators and layers on "cpu" or "cuda"."""
    goals = _cpu_goals() if device == "cpu" else _gpu_goals()
    dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16",)
    return [replace(goal, dtype=dtype) for dtype in dtypes for goal in goals]


def _cpu_goals() -> list[Goal]:
    sizes = sizes_of(GOALS, "cpu")
    moved = str(sizes["permute"][0])
    coarse, fine = sizes["routed_layer"]
    goals = [
        Goal("permute", FORWARD, moved, "", SHARE, 0.90),
        Goal("permute", BACKWARD, moved, "", SHARE, 0.90),
        *(
            Goal("unpermute", timed, moved, "", *rest)
            for timed in (FORWARD, BACKWARD)
            for rest in ((SHARE, 0.80), (SPEED, 10.0, "torch index_add"))
        ),
        Goal("routed_layer", BOTH, str(coarse), "", SPEED, 1.00, LIST_OF_EXPERTS),
        Goal("routed_layer", BOTH, str(coarse), "", SPEED, 1.15, _hf_grouped_mm(coarse)),
        Goal("routed_layer", BOTH, str(fine), "", SPEED, 1.30, _hf_grouped_mm(fine)),
    ]
    return goals + _autonomous_goals(sizes["aoe_layer"])


def _autonomous_goals(sizes: Iterable[Size]) -> list[Goal]:
    """The goals for the time of full and of selected gradients, and for the memory of both."""
    full = {64: 0.97, 128: 0.955, 256: 0.92, 512: 0.85}
    selected = {64: 0.99, 128: 0.98, 256: 0.97, 512: 0.94}
    goals = []
    for size in sizes:
        plain = Goal("aoe_layer", BOTH, str(size), "", SPEED, 0.0, layers.TWIN)
        goals += [
            replace(plain, contender=name, bound=bounds[size.l])
            for bounds, names in (
                (full, (layers.FULL_KEPT, layers.FULL_RECOMPUTED)),
                (selected, (layers.SELECTED,)),
            )
            for name in names
        ]
        if size.l == 256:
            goals += [
                replace(plain, contender=name, figure=SAVED, bound=0.75)
                for name in layers.AUTONOMOUS
            ]
    return goals


def _gpu_goals() -> list[Goal]:
    sizes = sizes_of(GOALS, "cuda")
    moved = str(sizes["permute"][0])
    goals = []
    for op, peer in (("permute", PERMUTE), ("unpermute", UNPERMUTE)):
        for timed in (FORWARD, BACKWARD):
            goals.append(Goal(op, timed, moved, "", SHARE, 0.80))
            goals.append(Goal(op, timed, moved, "", SPEED, 1.00, peer))
    for size, share in zip(sizes["grouped_gemm"], (0.90, 0.75), strict=True):
        for timed in (FORWARD, BACKWARD):
            goals.append(Goal("grouped_gemm", timed, str(size), "", SHARE, share))
            for peer in (GROUPED_MM, GROUPED_LINEAR):
                goals.append(Goal("grouped_gemm", timed, str(size), "", SPEED, 1.00, peer))
    for size in sizes["norm_topk"]:
        goals.append(Goal("norm_topk", FORWARD, str(size), "", SHARE, 1 / 1.10))
    return goals


def _hf_grouped_mm(size: Size) -> str:
    return f"{model_of(size.n)} grouped_mm"
