"""The figure of a run: loss, load of the experts, and entropies by layer.

Top: training and validation loss. Middle: the load of each expert of each layer at the end,
relative to an even load, and its history in the least even layer. Bottom: Ent_load and Ent_conf of
each layer over the run, and their maximum ln n. The colors suit every kind of color vision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from moe_parallel.analysis.run_history import RoutingHistory, RunHistory, interval_start
from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, read_metrics

FIGURE_NAME = "run.png"

TRAIN_COLOR = "#444444"
DOMAIN_COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe-Ito
DOMAIN_MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
LOAD_COLORS = "PuOr_r"  # purple: idle, white: even, orange: busy
LOAD_NORM = Normalize(vmin=0, vmax=2)  # fixed, so that the figures of two runs are comparable
LAYER_COLORS = "viridis"
MOST_LEGEND_LAYERS = 6
MOST_ANNOTATED_CELLS = 128

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}


def plot_run(run_directory: Path | str, model_line: str = "") -> Path:
    """Draw `run_directory`/metrics.jsonl into run.png next to it.

    `model_line` is printed under the title. Raises InputError if there is nothing to draw, or if
    the figure cannot be written.
    """
    directory = Path(run_directory)
    metrics = directory / METRICS_FILE
    if not metrics.is_file():
        raise InputError(f"{directory} has no {METRICS_FILE}: give the folder that --save named")
    records = read_metrics(metrics)
    if not records:
        raise InputError(f"{metrics} is empty: let the run reach its first logged iteration")
    path = directory / FIGURE_NAME
    figure = draw_run(records, directory.resolve().name, model_line)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise InputError(
            f"{path}: cannot write the picture ({error.strerror}): make room for it"
        ) from error
    return path


def draw_run(records: Sequence[MetricsLine], name: str, model_line: str = "") -> Figure:
    """The figure of at least one record of metrics.jsonl."""
    history = RunHistory.from_records(records)
    with matplotlib.rc_context(STYLE):
        routing = history.routing
        layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
        heights = [1.0] if routing is None else [1.05, 1.1, 0.9]
        figure = Figure(figsize=(12, 1 + 4 * sum(heights)), layout=layout)
        figure.suptitle(name, fontsize=15, fontweight="bold")
        parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        parts[0, 0].suptitle(_facts(history, model_line), fontsize=10.5, color=TRAIN_COLOR)
        _draw_loss(parts[0, 0].subplots(), history)
        if routing is not None:
            _draw_loads(parts[1, 0], routing, history)
            _draw_entropies(parts[2, 0], routing, history)
    return figure


def _facts(history: RunHistory, model_line: str) -> str:
    facts = [model_line] if model_line else []
    routing = history.routing
    if routing is not None:
        layers = f"{len(routing.layers)} MoE layer{'s' if len(routing.layers) > 1 else ''}"
        kind = "autonomous experts" if routing.has_norms else "experts"
        facts.append(f"{layers} of {routing.num_experts} {kind}")
    facts.append(f"{history.last_iteration:,} iterations")
    if history.consumed_tokens:
        short = EngFormatter(places=1, sep="")(history.consumed_tokens)
        facts.append(f"{short.replace('k', 'K').replace('G', 'B')} tokens")
    return "  ·  ".join(facts)


def _draw_loss(axes: Axes, history: RunHistory) -> None:
    train = history.train_loss
    if len(train.values_R):
        many = len(train.values_R) > 100
        if many:
            axes.plot(train.iterations_R, train.values_R, color=TRAIN_COLOR, alpha=0.25, lw=0.8)
        values = _smoothed(train.values_R) if many else train.values_R
        label = f"training{', smoothed' if many else ''}  {values[-1]:.3f}"
        style: dict[str, Any] = {"color": TRAIN_COLOR, "marker": _marker(train.iterations_R)}
        axes.plot(train.iterations_R, values, lw=1.6, label=label, zorder=3, **style)
    for index, (domain, curve) in enumerate(history.validation.items()):
        label = f"validation, {domain}  {curve.values_R[-1]:.3f}"
        if domain in history.bits_per_byte:
            label += f"  ({history.bits_per_byte[domain].values_R[-1]:.3f} bits/byte)"
        axes.plot(
            curve.iterations_R, curve.values_R, label=label, lw=1.2, markersize=5,
            color=DOMAIN_COLORS[index % len(DOMAIN_COLORS)],
            marker=DOMAIN_MARKERS[index % len(DOMAIN_MARKERS)],
            markevery=math.ceil(len(curve.values_R) / 25),
        )  # fmt: skip
    axes.set(title="Loss (value at the end)", xlabel="iteration", ylabel="loss, nats per token")
    _iteration_axis(axes, history, ticks=10)
    if axes.lines:
        axes.legend(loc="upper right", ncols=1 + (len(history.validation) > 5))


def _draw_loads(part: SubFigure, routing: RoutingHistory, history: RunHistory) -> None:
    left, right = part.subplots(1, 2)
    load_GE = routing.final_relative_load_GE()
    load_map(left, load_GE, routing.layers, ".2f" if load_GE.size <= MOST_ANNOTATED_CELLS else None)
    first = routing.iterations_R[-routing.final_records()]
    title = f"Load of each expert, iterations {first:,} to {routing.iterations_R[-1]:,}"
    if routing.final_records() == 1:
        title = f"Load of each expert, iteration {first:,}"
    if dropped := routing.dropped_share():
        share = f"{dropped:.2%}" if dropped >= 1e-4 else "under 0.01%"
        title += f"\n{share} of choices dropped over the run"
    left.set_title(title)
    _draw_load_over_time(right, routing)
    _iteration_axis(right, history, ticks=5)
    load_bar(part, [left, right])


def load_map(
    axes: Axes, load_GE: np.ndarray, layers: Sequence[int], numbers: str | None, ticks: int = 16
) -> None:
    """Draw the load of each expert of each layer. `numbers`: the format of the number in a cell;
    None: without."""
    axes.imshow(load_GE, cmap=LOAD_COLORS, norm=LOAD_NORM, aspect="auto", interpolation="none")
    for layer, expert in np.ndindex(*load_GE.shape) if numbers else ():
        value = load_GE[layer, expert]
        color = "white" if abs(value - 1) > 0.7 else "black"
        text = format(value, numbers or "")
        axes.text(expert, layer, text, ha="center", va="center", color=color, size=8)
    axes.set(xlabel="expert", ylabel="layer")
    count_ticks(axes.xaxis, range(load_GE.shape[1]), ticks)
    count_ticks(axes.yaxis, layers, ticks)
    axes.grid(False)


def load_bar(part: Figure | SubFigure, axes: Any) -> None:
    """The legend of the load's colors."""
    mappable = ScalarMappable(LOAD_NORM, LOAD_COLORS)
    bar = part.colorbar(mappable, ax=axes, aspect=30, extend="max")
    bar.set_label("load, multiples of an even share")


def _draw_load_over_time(axes: Axes, routing: RoutingHistory) -> None:
    worst = int(np.argmin(routing.ent_load_RG[-routing.final_records() :].mean(axis=0)))
    load_ER = routing.relative_load_RGE()[:, worst].T
    # Each value was measured over the interval that ends at its iteration.
    edges = [interval_start(routing.iterations_R.tolist()), *routing.iterations_R]
    experts = np.arange(routing.num_experts + 1) - 0.5
    axes.pcolormesh(edges, experts, load_ER, cmap=LOAD_COLORS, norm=LOAD_NORM)
    which = "" if len(routing.layers) == 1 else ", the least even at the end"
    title = f"Load over the run in layer {routing.layers[worst]}{which}"
    axes.set(title=title, xlabel="iteration", ylabel="expert")
    axes.invert_yaxis()
    count_ticks(axes.yaxis, range(routing.num_experts))
    axes.grid(False)


def _draw_entropies(part: SubFigure, routing: RoutingHistory, history: RunHistory) -> None:
    left, right = part.subplots(1, 2)
    panels = [
        (left, routing.ent_load_RG, "Ent_load: evenness of the load", "Ent_load, nats"),
        (right, routing.ent_conf_RG, "Ent_conf: low is a confident choice", "Ent_conf, nats"),
    ]
    colors = layer_colors(len(routing.layers))
    ceiling = math.log(routing.num_experts)
    for axes, values_RG, title, label in panels:
        for index, layer in enumerate(routing.layers):
            style = {"color": colors[index], "marker": _marker(routing.iterations_R)}
            values_R = values_RG[:, index]
            axes.plot(routing.iterations_R, values_R, lw=1.3, label=f"layer {layer}", **style)
        axes.axhline(ceiling, color="black", ls="--", lw=1)
        axes.annotate(
            f"ceiling ln {routing.num_experts} = {ceiling:.3f}",
            (1, ceiling), xytext=(0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="bottom", size=9,
        )  # fmt: skip
        axes.margins(y=0.12)
        axes.set(title=title, xlabel="iteration", ylabel=label)
        _iteration_axis(axes, history, ticks=5)
    if 1 < len(routing.layers) <= MOST_LEGEND_LAYERS:
        right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    elif len(routing.layers) > MOST_LEGEND_LAYERS:
        layer_bar(part, [left, right], routing.layers)


def layer_colors(number: int) -> np.ndarray:
    return matplotlib.colormaps[LAYER_COLORS](np.linspace(0, 0.9, number))


def layer_bar(part: Figure | SubFigure, axes: Any, layers: Sequence[int]) -> None:
    """The legend of the layers' colors."""
    color_map = matplotlib.colors.ListedColormap(list(layer_colors(len(layers))))
    norm = BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    bar = part.colorbar(ScalarMappable(norm, color_map), ax=axes, aspect=30, label="layer")
    shown = list(range(0, len(layers), math.ceil(len(layers) / 8)))
    bar.set_ticks(shown, labels=[str(layers[index]) for index in shown])
    bar.ax.minorticks_off()
    bar.ax.invert_yaxis()


def _iteration_axis(axes: Axes, history: RunHistory, ticks: int) -> None:
    """Give the iteration axis the same span in every panel."""
    span = max(1, history.last_iteration - history.start)
    axes.set_xlim(history.start, history.start + 1.02 * span)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(lambda iteration, _: f"{iteration:,.0f}")


def count_ticks(axis: Axis, labels: Sequence[object], most: int = 16) -> None:
    """Set at most `most` evenly spaced ticks, each on its cell."""
    places = range(0, len(labels), math.ceil(len(labels) / most))
    axis.set_ticks(list(places), labels=[str(labels[place]) for place in places])


def _marker(points_R: np.ndarray) -> str:
    """The marker of a curve with few points. A single point would be invisible without one."""
    return "." if len(points_R) <= 20 else ""


def _smoothed(values_R: np.ndarray) -> np.ndarray:
    """The mean over a hundredth of the points to either side, without values that are not
    finite."""
    finite, window = np.isfinite(values_R), np.ones(2 * max(1, len(values_R) // 100) + 1)
    total = np.convolve(np.where(finite, values_R, 0), window, "same")
    number = np.convolve(finite, window, "same")
    return np.where(number > 0.5, total / np.maximum(number, 1), np.nan)
