"""The style of a study's figures: that of a run's, with a color and a line for each contender."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from moe_parallel.analysis.run_figure import DOMAIN_COLORS, DOMAIN_MARKERS, LAYER_COLORS

REFERENCE_COLOR = "#444444"
BAND_ALPHA = 0.12  # light, because the bands of ten contenders may overlap
_DASHES: list[Any] = ["-", (0, (4, 1.5)), (0, (1, 1))]


def new_figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """A figure with a title and, in smaller type below it, a description."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(subtitle, fontsize=9.5, color=REFERENCE_COLOR, x=0.01, ha="left")
    return figure


def contender_style(place: int) -> dict[str, Any]:
    """The style of the contender at `place` of the study, the same in every figure. The colors
    suit every kind of color vision; lines of one color differ in dashes and markers."""
    return {
        "color": DOMAIN_COLORS[place % len(DOMAIN_COLORS)],
        "ls": _DASHES[place // len(DOMAIN_COLORS) % len(_DASHES)],
        "marker": DOMAIN_MARKERS[place % len(DOMAIN_MARKERS)],
    }


def domain_color(place: int) -> str:
    return DOMAIN_COLORS[place % len(DOMAIN_COLORS)]


def layer_colors(number: int) -> np.ndarray:
    return matplotlib.colormaps[LAYER_COLORS](np.linspace(0, 0.9, number))


def token_axis(axes: Axes) -> None:
    axes.set_xlabel("tokens read")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def count_ticks(axes: Axes, which: str, labels: Sequence[object]) -> None:
    """Set at most 9 evenly spaced ticks at 0, 1, ..."""
    places = list(range(0, len(labels), math.ceil(len(labels) / 9)))
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(places, labels=[str(labels[place]) for place in places])


def grid(panels: int, most_columns: int) -> tuple[int, int]:
    """(rows, columns) for `panels` panels, with rows as even as possible."""
    rows = math.ceil(panels / most_columns)
    return rows, math.ceil(panels / rows)
