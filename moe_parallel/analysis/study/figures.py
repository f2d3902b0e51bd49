"""The figures of a study: losses, and four of the routing, modeled on those of the papers.

A figure of single experts shows the run with the first seed: expert 3 of one run is not expert 3 of
another, so a mean over seeds would mean nothing. A figure is None if no contender has its measure.
"""

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

from moe_parallel.analysis.run_figure import (
    DOMAIN_COLORS,
    DOMAIN_MARKERS,
    STYLE,
    count_ticks,
    layer_bar,
    layer_colors,
    load_bar,
    load_map,
)
from moe_parallel.analysis.run_history import layer_numbers
from moe_parallel.analysis.study.results import Comparisons, Result, StudyResults

REFERENCE_COLOR = "#444444"
BAND_ALPHA = 0.12  # light, because the bands of ten contenders may overlap
MOST_TICKS = 9  # of experts or layers
MOST_NUMBERED_CELLS = 40
CURVE_POINTS = 20  # points of a training curve, each the mean of several logged points
SHOWN_FROM = 0.3  # the range of a loss panel is that of the values after this part of the run
_DASHES: list[Any] = ["-", (0, (4, 1.5)), (0, (1, 1))]


def new_figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """A figure with a title and, in smaller type below it, a description."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(subtitle, fontsize=9.5, color=REFERENCE_COLOR, x=0.01, ha="left")
    return figure


def domain_color(place: int) -> str:
    return DOMAIN_COLORS[place % len(DOMAIN_COLORS)]


def contender_style(place: int) -> dict[str, Any]:
    """The style of the contender at `place` of the study, the same in every figure. The colors
    suit every kind of color vision; lines of one color differ in dashes and markers."""
    return {
        "color": domain_color(place),
        "ls": _DASHES[place // len(DOMAIN_COLORS) % len(_DASHES)],
        "marker": DOMAIN_MARKERS[place % len(DOMAIN_MARKERS)],
    }


def _panels(
    study: StudyResults, number: int, most_columns: int, size: tuple[float, float], *texts: str
) -> tuple[Figure, np.ndarray]:
    """A figure of `number` panels of this size, with rows as even as possible."""
    rows = math.ceil(number / most_columns)
    columns = math.ceil(number / rows)
    title, subtitle = texts
    figure = new_figure(
        size[0] * columns + 1, size[1] * rows + 0.7, f"{study.name}: {title}", subtitle
    )
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[number:]:
        axes.set_axis_off()
    return figure, panels


def _token_axis(axes: Axes) -> None:
    axes.set_xlabel("tokens read")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_band(
    axes: Axes, at_R: Any, values_SR: np.ndarray, place: int, name: str, **more: Any
) -> None:
    """The mean over seeds as a line, and the band between the lowest and the highest."""
    style = contender_style(place)
    axes.plot(at_R, values_SR.mean(axis=0), label=name, lw=1.4, **{**style, **more})
    if len(values_SR) > 1:
        low_R, high_R = values_SR.min(axis=0), values_SR.max(axis=0)
        axes.fill_between(at_R, low_R, high_R, color=style["color"], alpha=BAND_ALPHA, lw=0)


def draw_losses(study: StudyResults) -> Figure:
    """The losses in training and on each held-out domain that was evaluated during it and, below
    them, each loss minus that of the first contender with the same seed: differences are small
    compared with the decrease."""
    read = {d: len(study.reference.first.loss(d).tokens_R) for d in study.domains}
    columns: list[str | None] = [None, *(domain for domain, times in read.items() if times > 1)]
    rows = 2 if len(study.results) > 1 else 1
    across, down = (len(columns), rows) if len(columns) > 1 else (rows, 1)
    figure = new_figure(
        4.4 * across + 1.6,
        3.6 * down + 0.8,
        f"{study.name}: loss",
        f"Lines: mean over {study.seeds_told}; bands: lowest to highest. "
        f"Differences are between runs with the same seed.",
    )
    grid = figure.subplots(down, across, sharex=True, squeeze=False)
    panels = grid.reshape(rows, len(columns))
    for column, domain in enumerate(columns):
        top = panels[0, column]
        late = []
        for place, result in enumerate(study.results):
            tokens_R, losses_SR = _losses(result, list(result.runs), domain)
            late += _draw_losses(top, tokens_R, losses_SR, place, result.name)
        top.set(title="training" if domain is None else f"held out, {domain}",
                ylabel="nats per token")  # fmt: skip
        _set_range(top, late)
        if rows == 2:
            _draw_differences(panels[1, column], study, domain)
    for axes in grid[-1]:
        _token_axis(axes)
    lines = panels[0, -1].get_lines()
    figure.legend(handles=lines, loc="outside right upper", handlelength=3)
    return figure


def _draw_losses(
    axes: Axes, tokens_R: np.ndarray, values_SR: np.ndarray, place: int, name: str
) -> list[float]:
    """Draw a contender; returns the values in the later part of the run."""
    if not len(tokens_R):
        return []
    few: dict[str, Any] = {} if len(tokens_R) <= 12 else {"marker": ""}
    _draw_band(axes, tokens_R, values_SR, place, name, markersize=4, zorder=3, **few)
    return values_SR[:, tokens_R >= SHOWN_FROM * tokens_R[-1]].ravel().tolist()


def _set_range(axes: Axes, values: Sequence[float]) -> None:
    if len(values):
        low, high = np.nanmin(values), np.nanmax(values)
        margin = 0.05 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def _draw_differences(axes: Axes, study: StudyResults, domain: str | None) -> None:
    reference = study.reference
    axes.axhline(0, **{**contender_style(0), "marker": ""})
    late = [0.0]
    for place, result in enumerate(study.results):
        seeds = [seed for seed in result.runs if seed in reference.runs]
        if result is reference or not seeds:
            continue
        tokens_R, losses_SR = _losses(result, seeds, domain)
        other_R, other_SR = _losses(reference, seeds, domain)
        if tokens_R.tolist() == other_R.tolist():
            late += _draw_losses(axes, tokens_R, losses_SR - other_SR, place, result.name)
    _set_range(axes, late)
    axes.set(title=f"minus {reference.name}, same seed", ylabel="nats per token")


def _losses(
    result: Result, seeds: Sequence[int], domain: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens read [R], losses [S, R]) at the points that all runs have; of more than CURVE_POINTS,
    means over as many groups of neighbors."""
    curves = [result.runs[seed].history.loss(domain) for seed in seeds]
    common = sorted(set.intersection(*(set(curve.tokens_R.tolist()) for curve in curves)))
    at_R = np.array(common, dtype=np.int64)
    losses_SR = np.array([each.values_R[np.searchsorted(each.tokens_R, at_R)] for each in curves])
    if len(at_R) <= CURVE_POINTS:
        return at_R, losses_SR
    groups = np.array_split(np.arange(len(at_R)), CURVE_POINTS)
    tokens = np.array([at_R[group].mean() for group in groups])
    return tokens, np.stack([losses_SR[:, group].mean(axis=1) for group in groups], axis=1)


def draw_tests(study: StudyResults) -> Figure | None:
    """Each compared contender's loss minus the reference's: every seed, and the mean with its 95%
    interval, beside the margin."""
    comparisons = Comparisons.of(study)
    if comparisons is None or not comparisons.compared:
        return None
    compared, margin = comparisons.compared, comparisons.margin
    figure = new_figure(
        9.5,
        0.42 * len(compared) + 1.7,
        f"{study.name}: loss minus that of {study.reference.name}",
        f"Dots: seeds; lines: mean and 95% interval; gray: the margin of ±{margin:g}. Left is "
        "better.",
    )
    axes = figure.subplots()
    axes.axvspan(-margin, margin, color="#e8e8e8", lw=0, zorder=0)
    axes.axvline(0, color=REFERENCE_COLOR, lw=0.8)
    places = {result.name: place for place, result in enumerate(study.results)}
    for row, (name, each) in enumerate(compared.items()):
        color = domain_color(places[name])
        axes.plot(each.differences, [row] * len(each.differences), "o", color=color, alpha=0.35,
                  markersize=4)  # fmt: skip
        axes.plot([each.test.low, each.test.high], [row, row], color=color, lw=2.5)
        axes.plot(each.test.mean, row, "|", color=color, markersize=14, markeredgewidth=2.5)
    axes.set_yticks(range(len(compared)), list(compared))
    axes.set(ylim=(len(compared) - 0.5, -0.5), xlabel="nats per token")
    verdicts = axes.secondary_yaxis("right")
    verdicts.set_yticks(range(len(compared)), [each.verdict for each in compared.values()])
    verdicts.tick_params(length=0)
    verdicts.spines["right"].set_visible(False)
    return figure


def draw_loads(study: StudyResults) -> Figure | None:
    """The load of each expert of each layer, a map for each contender. [AoE, Fig. 3]"""
    histories = [(result, result.first.routing) for result in study.results]
    shown = [(result, it.final_relative_load_GE()) for result, it in histories if it is not None]
    if not shown:
        return None
    height = max(1.6, 0.26 * max(len(load_GE) for _, load_GE in shown))
    figure, panels = _panels(
        study, len(shown), 4, (3.3, height + 1), "load of the experts",
        "In training, at the end of the run with the first seed; entropies: mean ± standard "
        "deviation over the seeds.",
    )  # fmt: skip
    for axes, (result, load_GE) in zip(panels.flat, shown, strict=False):
        numbers = ".1f" if load_GE.size <= MOST_NUMBERED_CELLS else None
        layers = layer_numbers(result.first.training[-1]["layers"])
        load_map(axes, load_GE, layers, numbers, MOST_TICKS)
        title = result.name
        for name, told in (("ent_load", "Ent_load"), ("ent_conf", "Ent_conf")):
            if (spread := result.spreads.get(name)) is not None:
                title += f"\n{told} {spread.mean:.3f}"
                title += "" if spread.deviation is None else f" ± {spread.deviation:.3f}"
        axes.set_title(title, fontsize=10)
    load_bar(figure, panels)
    return figure


def draw_norms(study: StudyResults) -> Figure | None:
    """The mean norm of every expert over training, colored by layer. [AoE, Fig. 4]"""
    shown = [(r, norms) for r in study.results if (norms := r.first.norms_RGE()) is not None]
    if not shown:
        return None
    figure, panels = _panels(
        study, len(shown), 3, (4.4, 3.4), "norms by which experts choose themselves",
        "A line for each expert: its mean over all tokens, in the run with the first seed.",
    )  # fmt: skip
    for axes, (result, (tokens_R, norms_RGE)) in zip(panels.flat, shown, strict=False):
        colors = layer_colors(norms_RGE.shape[1])
        for layer, expert in np.ndindex(*norms_RGE.shape[1:]):
            axes.plot(tokens_R, norms_RGE[:, layer, expert], color=colors[layer], lw=0.9)
        axes.set(title=result.name, ylabel="mean norm")
        axes.set_ylim(bottom=0)
        _token_axis(axes)
    layer_bar(figure, panels, layer_numbers(shown[0][0].first.training[-1]["layers"]))
    return figure


def draw_experts_per_token(study: StudyResults) -> Figure | None:
    """Experts per token by layer, a panel for each held-out domain. [Dynamic routing, Fig. 4]

    A contender is a line if the number varies; the legend lists the others.
    """
    varying: dict[int, list[dict[str, np.ndarray]]] = {}  # by place in the study
    constant: dict[float, list[str]] = {}
    for place, result in enumerate(study.results):
        counts = [run.history.held_out("experts_per_token") for run in result.runs.values()]
        if not all(counts):
            continue
        values = np.concatenate([values_G for of_run in counts for values_G in of_run.values()])
        if np.ptp(values) > 1e-6:
            varying[place] = counts
        else:
            constant.setdefault(round(float(values[0]), 3), []).append(result.name)
    if not varying:
        return None
    figure = new_figure(
        4.4 * len(study.domains) + 1.6,
        4.2,
        f"{study.name}: experts per token",
        "On held-out text, at the end. Lines: mean over seeds; bands: lowest to highest.",
    )
    panels = figure.subplots(1, len(study.domains), sharey=True, squeeze=False)[0]
    for axes, domain in zip(panels, study.domains, strict=True):
        for place, counts in varying.items():
            result = study.results[place]
            layers = layer_numbers(result.first.final[domain]["layers"])
            values_SG = np.array([of_run[domain] for of_run in counts])
            _draw_band(axes, layers, values_SG, place, result.name, markersize=5)
            axes.set_xticks(layers[:: max(1, len(layers) // 8)])
        for level, names in constant.items():
            label = f"{level:g} in every layer:\n" + "\n".join(f"  {name}" for name in names)
            axes.axhline(level, color=REFERENCE_COLOR, lw=1, ls=":", label=label)
        axes.set(title=f"held out, {domain}", xlabel="layer")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("experts per token")
    figure.legend(handles=panels[0].get_lines(), loc="outside right upper", handlelength=3)
    return figure


def draw_domain_weights(study: StudyResults) -> Figure | None:
    """The mean routing weight of each expert by held-out domain, in three layers. [Lory, Fig. 6]"""
    found = [(r, r.first.held_out("routing_weight_per_expert")) for r in study.results]
    shown = [(result, weights) for result, weights in found if weights]
    if not shown:
        return None
    numbers = layer_numbers(next(iter(shown[0][0].first.final.values()))["layers"])
    chosen = sorted({0, len(numbers) // 2, len(numbers) - 1})
    figure = new_figure(
        4.2 * len(chosen) + 1.2,
        2.5 * len(shown) + 0.9,
        f"{study.name}: routing weight by domain",
        "Of each expert in the merged one, mean over held-out tokens, in the run with the "
        "first seed.",
    )
    panels = figure.subplots(len(shown), len(chosen), sharey=True, squeeze=False)
    for row, (result, by_domain) in zip(panels, shown, strict=True):
        for axes, layer in zip(row, chosen, strict=True):
            width = 0.8 / len(by_domain)
            for place, (domain, weights_GE) in enumerate(by_domain.items()):
                at_E = np.arange(weights_GE.shape[1]) + (place - (len(by_domain) - 1) / 2) * width
                axes.bar(at_E, weights_GE[layer], width, color=domain_color(place), label=domain)
            axes.axhline(1 / len(at_E), color="black", ls="--", lw=0.8)
            count_ticks(axes.xaxis, range(len(at_E)), MOST_TICKS)
            axes.grid(False, axis="x")
            axes.set_axisbelow(True)
            axes.set_title(f"{result.name}, layer {numbers[layer]}")
        row[0].set_ylabel("mean weight")
    for axes in panels[-1]:
        axes.set_xlabel("expert")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper")
    return figure


FIGURES = {
    "tests": draw_tests,
    "loss": draw_losses,
    "load": draw_loads,
    "norms": draw_norms,
    "experts_per_token": draw_experts_per_token,
    "domain_weights": draw_domain_weights,
}


def draw_figures(study: StudyResults) -> dict[str, Figure]:
    """The figures by name, without those of which the study has no measure."""
    with matplotlib.rc_context(STYLE):
        drawn = {name: draw(study) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}
