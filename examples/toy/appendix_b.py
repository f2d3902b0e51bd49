r"""The toy experiment of the AoE paper, Appendix B: which expert takes a new class?

    python examples/toy/appendix_b.py --seeds 20 --figure runs/toy.png

Two experts learn to classify Gaussian inputs; one of them computes each input (K = 1). Stage 1 has
classes 1 and 2, with mean +1 and -1 in every coordinate. Stage 2 adds class 3, with mean 0. In the
MoE a router selects the expert; in AoE the norms do. The program prints every seed, counts how
often the paper's claims were true, and draws a figure like the paper's Figure 5. It takes about a
second per seed on one core. The paper does not state the sizes: these are ours.

Shape suffixes: T inputs, D input width, E experts, F and W widths of an expert, R low-rank size,
Y classes, M measurements, N seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

WIDTH, EXPERTS, CLASSES = 16, 2, 3
FFN_WIDTH = 32  # F, of a SwiGLU expert
RANK, WIDE = 8, 32  # R and W, of an AoE expert
MEANS_Y = torch.tensor([1.0, -1.0, 0.0])
SIGMA = 0.15  # the ranges of three sigma around the means do not overlap
INIT_STD = 0.1
LEARNING_RATE = 1e-2
BATCH = 256
STEPS = 300  # of each stage
EVERY = 5  # steps between measurements
PROBES = 512  # inputs of each class in a measurement

ALL, HALF = 0.9, (0.3, 0.7)  # what counts as "all inputs of a class" and as "split"


class Toy(nn.Module):
    """A single MoE layer from D inputs to Y logits. Subclasses define the scores."""

    name: str
    decided_by: str  # the name of the scores
    scale: str  # the scale of an axis of scores

    def scores(self, x_TD: Tensor) -> Tensor:
        """The score of each expert for each input: [T, E]. The largest score selects."""
        raise NotImplementedError

    def probs(self, scores_TE: Tensor) -> Tensor:
        """The weight of each expert's output if that expert is selected: [T, E]."""
        raise NotImplementedError

    def answers(self, x_TD: Tensor) -> Tensor:
        """The outputs of all experts: [T, E, Y]. At this size this is faster than dispatch."""
        raise NotImplementedError

    def forward(self, x_TD: Tensor) -> Tensor:
        scores_TE = self.scores(x_TD)
        taken_TE = F.one_hot(scores_TE.argmax(1), EXPERTS)
        return torch.einsum("te,tey->ty", taken_TE * self.probs(scores_TE), self.answers(x_TD))


class RoutedToy(Toy):
    """MoE: a linear router selects; the prob is its softmax, as in Switch Transformer."""

    name, decided_by, scale = "MoE", "router's logit", "linear"

    def __init__(self) -> None:
        super().__init__()
        self.w_router_DE = _weight(WIDTH, EXPERTS)
        self.w_g_EDF = _weight(EXPERTS, WIDTH, FFN_WIDTH)
        self.w_p_EDF = _weight(EXPERTS, WIDTH, FFN_WIDTH)
        self.w_out_EFY = _weight(EXPERTS, FFN_WIDTH, CLASSES)

    def scores(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.w_router_DE

    def probs(self, scores_TE: Tensor) -> Tensor:
        return scores_TE.softmax(1)

    def answers(self, x_TD: Tensor) -> Tensor:
        h_ETF = F.silu(x_TD @ self.w_g_EDF) * (x_TD @ self.w_p_EDF)
        return (h_ETF @ self.w_out_EFY).transpose(0, 1)


class AutonomousToy(Toy):
    """AoE: the largest ||x W_down|| selects the expert; the softmax over one norm is 1."""

    name, decided_by, scale = "AoE", "norm of x W_down", "log"

    def __init__(self) -> None:
        super().__init__()
        self.w_down_EDR = _weight(EXPERTS, WIDTH, RANK)
        self.w_up_ERW = _weight(EXPERTS, RANK, WIDE)
        self.w_p_EDW = _weight(EXPERTS, WIDTH, WIDE)
        self.w_out_EWY = _weight(EXPERTS, WIDE, CLASSES)

    def scores(self, x_TD: Tensor) -> Tensor:
        return (x_TD @ self.w_down_EDR).norm(dim=2).T

    def probs(self, scores_TE: Tensor) -> Tensor:
        return torch.ones_like(scores_TE)

    def answers(self, x_TD: Tensor) -> Tensor:
        gate_ETW = F.silu(x_TD @ self.w_down_EDR @ self.w_up_ERW)
        return ((gate_ETW * (x_TD @ self.w_p_EDW)) @ self.w_out_EWY).transpose(0, 1)


TOYS = (RoutedToy, AutonomousToy)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(INIT_STD * torch.randn(shape))


def inputs_of(classes_T: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian inputs of the given classes, counted from 0: [T, D]."""
    noise_TD = torch.randn(len(classes_T), WIDTH, generator=generator)
    return MEANS_Y[classes_T, None] + SIGMA * noise_TD


@dataclass(frozen=True)
class History:
    """The history of one seed. Expert 0 is the expert that had class 1 at the end of stage 1."""

    steps_M: list[int]
    share_MYE: Tensor  # the share of the inputs of a class that an expert takes
    score_MYE: Tensor  # the score (logit or norm), mean over the inputs of a class
    accuracy_MY: Tensor
    arrival: int  # the measurement before the first step with class 3

    @property
    def each_has_one(self) -> bool:
        """Whether the experts have divided classes 1 and 2 at the end of stage 1."""
        return bool((self.share_MYE[self.arrival, :2].diagonal() > ALL).all())

    @property
    def one_has_both(self) -> bool:
        """Whether one expert takes classes 1 and 2 at the end of stage 1."""
        return bool((self.share_MYE[self.arrival, :2, 0] > ALL).all())

    def splits_class_3(self, measurement: int) -> bool:
        """Whether both experts take a fair part of class 3."""
        low, high = HALF
        return low < float(self.share_MYE[measurement, 2, 0]) < high

    @property
    def divided_in_the_end(self) -> bool:
        """Whether one expert ends with classes 1 and 2, and the other with class 3."""
        share_YE = self.share_MYE[-1]
        return bool((share_YE[:2, 0] > ALL).all() and share_YE[2, 1] > ALL)


def train(kind: Callable[[], Toy], seed: int, steps: int = STEPS) -> History:
    """Both stages, `steps` each, with a measurement before the first step and every few steps."""
    torch.manual_seed(seed)
    toy = kind()
    optimizer = torch.optim.AdamW(toy.parameters(), lr=LEARNING_RATE)
    data = torch.Generator().manual_seed(seed)
    steps_M = sorted({*range(0, 2 * steps, EVERY), steps, 2 * steps})
    measured = []
    for step in range(2 * steps + 1):  # the last one to measure after the rest
        if step in steps_M:
            measured.append(_measure(toy, seed))
        classes_T = torch.randint(2 if step < steps else 3, (BATCH,), generator=data)
        loss = F.cross_entropy(toy(inputs_of(classes_T, data)), classes_T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    share, score, accuracy = (torch.stack(each) for each in zip(*measured, strict=True))
    arrival = steps_M.index(steps)
    first = int(share[arrival, 0].argmax())
    order = [first, 1 - first]
    return History(steps_M, share[:, :, order], score[:, :, order], accuracy, arrival)


@torch.no_grad()
def _measure(toy: Toy, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(share_YE, score_YE, accuracy_Y) on inputs that are the same each time."""
    classes_T = torch.arange(CLASSES).repeat_interleave(PROBES)
    x_TD = inputs_of(classes_T, torch.Generator().manual_seed(10_000 + seed))
    scores_TE = toy.scores(x_TD)
    taken_TE = F.one_hot(scores_TE.argmax(1), EXPERTS).float()
    right_T = (toy(x_TD).argmax(1) == classes_T).float()

    def mean_by_class(values: Tensor) -> Tensor:
        return values.unflatten(0, (CLASSES, PROBES)).mean(1)

    return mean_by_class(taken_TE), mean_by_class(scores_TE), mean_by_class(right_T)


def table(name: str, histories: Sequence[History]) -> str:
    """One line for each seed."""
    lines = [
        f"{name}: share of each class that the expert of class 1 takes",
        "seed    stage 1: 1     2   arrival: 3   end: 1     2     3   accuracy",
    ]
    for seed, each in enumerate(histories):
        arrival_Y, end_Y = each.share_MYE[each.arrival, :, 0], each.share_MYE[-1, :, 0]
        accuracy = each.accuracy_MY[-1].mean()
        lines.append(
            f"{seed:4}        {arrival_Y[0]:5.2f} {arrival_Y[1]:5.2f}        {arrival_Y[2]:5.2f}"
            f"    {end_Y[0]:5.2f} {end_Y[1]:5.2f} {end_Y[2]:5.2f}      {accuracy:5.3f}"
        )
    return "\n".join(lines)


def summary(moe: Sequence[History], aoe: Sequence[History]) -> str:
    """The number of seeds for which each claim of the paper is true."""
    # Each claim of the paper, and whether it is true, by seed.
    claims = {
        "MoE, stage 1: each class has its own expert": [h.each_has_one for h in moe],
        "MoE, arrival: class 3 is split": [h.splits_class_3(h.arrival) for h in moe],
        "MoE, end: class 3 is still split": [h.splits_class_3(-1) for h in moe],
        "AoE, stage 1: one expert has both classes": [h.one_has_both for h in aoe],
        "AoE, arrival: the idle expert gets most of class 3": [
            bool(h.share_MYE[h.arrival, 2, 1] > 0.5) for h in aoe
        ],
        "AoE, end: the idle expert has class 3, the other 1 and 2": [
            h.divided_in_the_end for h in aoe
        ],
    }
    return "\n".join(f"{sum(seen):3} of {len(seen)}  {claim}" for claim, seen in claims.items())


COLORS_Y = ["#0072B2", "#D55E00", "#009E73"]  # Okabe-Ito: suits every kind of color vision
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw(moe: Sequence[History], aoe: Sequence[History]) -> Figure:
    """Draw the shares and scores of the first seed over the steps, and the end of all seeds."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13.5, 7.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        rows = figure.subplots(2, 3, width_ratios=[1.2, 1.2, 1])
        for axes, toy, histories in zip(rows, TOYS, (moe, aoe), strict=True):
            _draw_shares(axes[0], toy.name, histories[0])
            axes[1].set_yscale(toy.scale)
            _draw_scores(axes[1], toy.decided_by, histories[0])
            _draw_seeds(axes[2], histories)
        count = f"{sum(h.divided_in_the_end for h in aoe)} of {len(aoe)}"
        figure.suptitle(
            "Class 3 arrives: the router splits it between the experts (MoE), the idle expert "
            f"takes it (AoE, in {count} seeds)",
            fontweight="bold",
        )
    return figure


def _draw_shares(axes: Axes, name: str, history: History) -> None:
    for y in range(CLASSES):
        _curve(axes, history, history.share_MYE[:, y, 0], y, label=f"class {y + 1}")
    _stages(axes, history)
    axes.set_title(f"{name}: who takes which class\n")
    axes.set(ylabel="share taken by expert A", ylim=(-0.04, 1.04))
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.72), handlelength=2.6)


def _draw_scores(axes: Axes, decided_by: str, history: History) -> None:
    for y in range(CLASSES):
        _curve(axes, history, history.score_MYE[:, y, 0], y)
        _curve(axes, history, history.score_MYE[:, y, 1], y, ls="--", lw=1.4)
    _stages(axes, history)
    axes.set_title(f"What decides: the {decided_by}\n")
    axes.set(ylabel="mean over the inputs of a class")
    gray = [Line2D([], [], color="#444444", lw=1.8, ls=line) for line in ("-", "--", ":")]
    axes.legend(gray, ["expert A", "expert B", "not yet trained on"], loc="best", fontsize=9)


def _curve(axes: Axes, history: History, value_M: Tensor, y: int, **style: Any) -> None:
    """A curve of class `y`; dotted while class 3 is measured but not yet trained on."""
    # Class 2 often lies on class 1: the lower curve is the wider one.
    style = {"color": COLORS_Y[y], "lw": (4.5, 1.8, 2.2)[y], **style}
    born = history.arrival if y == 2 else 0
    axes.plot(history.steps_M[born:], value_M[born:], **style)
    before = {**style, "ls": ":", "label": None}
    axes.plot(history.steps_M[: born + 1], value_M[: born + 1], **before)


def _stages(axes: Axes, history: History) -> None:
    """Shade stage 2, and name both stages above."""
    end, arrival = history.steps_M[-1], history.steps_M[history.arrival]
    axes.axvspan(arrival, end, color="#f2f2f2", zorder=0)
    axes.set(xlim=(0, end), xlabel="step")
    for start, text in ((0, "stage 1: classes 1 and 2"), (arrival, "stage 2: all three")):
        place = (start + 0.015 * end, 1.015)
        axes.annotate(text, place, xycoords=("data", "axes fraction"), size=9, color="#666666")


def _draw_seeds(axes: Axes, histories: Sequence[History]) -> None:
    """Expert A's share of each class: hollow at the end of stage 1, full at that of stage 2."""
    across_N = torch.linspace(-0.15, 0.15, len(histories))
    for y, color in enumerate(COLORS_Y):
        for stage, fill in ((1, "none"), (2, color)):
            moments = [h.arrival if stage == 1 else -1 for h in histories]
            share_N = [h.share_MYE[m, y, 0] for h, m in zip(histories, moments, strict=True)]
            place_N = y + 0.4 * (stage - 1.5) + across_N
            axes.scatter(place_N, share_N, s=24, edgecolors=color, facecolors=fill)
    axes.set_title(f"All {len(histories)} seeds\n")
    axes.set(ylabel="share taken by expert A", ylim=(-0.04, 1.04))
    axes.set_xticks(range(CLASSES), [f"class {y + 1}" for y in range(CLASSES)])
    ends = [
        Line2D([], [], color="#444444", marker="o", ls="", markerfacecolor="none"),
        Line2D([], [], color="#444444", marker="o", ls=""),
    ]
    axes.legend(ends, ["end of stage 1", "end of stage 2"], loc="center left")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument(
        "--figure", type=Path, default=Path("runs/toy.png"), help="PNG file (default: runs/toy.png)"
    )
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}: it must be at least 1")
    moe, aoe = ([train(toy, seed) for seed in range(options.seeds)] for toy in TOYS)
    print(table("MoE", moe), table("AoE", aoe), summary(moe, aoe), sep="\n\n")
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    draw(moe, aoe).savefig(options.figure, dpi=130)
    print(f"\nfigure: {options.figure}")


if __name__ == "__main__":
    main()
