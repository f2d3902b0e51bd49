"""Loss curves of a study: the mean over seeds, and the band between the lowest and the highest.

Top: the losses in training and on each held-out domain. The differences between systems are small
compared with the decrease over training. So the bottom row shows the difference: each loss minus
that of the first contender with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_parallel.analysis.run_figure import STYLE
from moe_parallel.analysis.study.figure_style import (
    BAND_ALPHA,
    contender_style,
    new_figure,
    token_axis,
)
from moe_parallel.analysis.study.results import Result, StudyResults

CURVE_POINTS = 20  # points of a training curve, each the mean of several logged points
SHOWN_FROM = 0.3  # the range of the panel is that of the losses after this part of the run


def draw_losses(study: StudyResults) -> Figure:
    """Draw the figure. Its columns are training, then the held-out domains."""
    columns: list[str | None] = [None, *study.domains]
    rows = 2 if len(study.results) > 1 else 1
    with matplotlib.rc_context(STYLE):
        figure = new_figure(
            4.4 * len(columns) + 1.6,
            3.6 * rows + 0.8,
            f"{study.name}: loss",
            f"Lines: mean over {study.seeds_told}; bands: lowest to highest. "
            f"Differences are between runs with the same seed.",
        )
        panels = figure.subplots(rows, len(columns), sharex=True, squeeze=False)
        for column, domain in enumerate(columns):
            _draw_column(list(panels[:, column]), study, domain)
        lines = panels[0, -1].get_lines()
        figure.legend(handles=lines, loc="outside right upper", handlelength=3)
    return figure


def _draw_column(panels: Sequence[Axes], study: StudyResults, domain: str | None) -> None:
    title = "training" if domain is None else f"held out, {domain}"
    late = []
    for place, result in enumerate(study.results):
        tokens_R, losses_SR = _losses(result, list(result.runs), domain)
        if not len(tokens_R):
            continue
        _draw_band(panels[0], tokens_R, losses_SR, place, result.name)
        late.append(losses_SR[:, tokens_R >= SHOWN_FROM * tokens_R[-1]])
    panels[0].set(title=title, ylabel="nats per token")
    if late:
        lowest = min(np.nanmin(part) for part in late)
        highest = max(np.nanmax(part) for part in late)
        margin = 0.05 * (highest - lowest) or 0.1
        panels[0].set_ylim(lowest - margin, highest + margin)
    for axes in panels[1:]:
        _draw_differences(axes, study, domain)
    token_axis(panels[-1])


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
        if tokens_R.tolist() == other_R.tolist() and len(tokens_R):
            difference_SR = losses_SR - other_SR
            _draw_band(axes, tokens_R, difference_SR, place, result.name)
            late += difference_SR[:, tokens_R >= SHOWN_FROM * tokens_R[-1]].ravel().tolist()
    margin = 0.05 * (np.nanmax(late) - np.nanmin(late)) or 0.1
    axes.set_ylim(np.nanmin(late) - margin, np.nanmax(late) + margin)
    axes.set(title=f"minus {reference.name}, same seed", ylabel="nats per token")


def _draw_band(
    axes: Axes, tokens_R: np.ndarray, values_SR: np.ndarray, place: int, name: str
) -> None:
    style = contender_style(place)
    few = len(tokens_R) <= 12
    axes.plot(
        tokens_R,
        values_SR.mean(axis=0),
        lw=1.4,
        markersize=4,
        zorder=3,
        label=name,
        **{**style, "marker": style["marker"] if few else ""},
    )
    if len(values_SR) > 1:
        low_R, high_R = values_SR.min(axis=0), values_SR.max(axis=0)
        axes.fill_between(tokens_R, low_R, high_R, color=style["color"], alpha=BAND_ALPHA, lw=0)


def _losses(
    result: Result, seeds: Sequence[int], domain: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens read [R], losses [S, R]) at the points that all runs have."""
    curves = [result.runs[seed].history.loss(domain) for seed in seeds]
    common = sorted(set.intersection(*(set(curve.tokens_R.tolist()) for curve in curves)))
    at = np.array(common, dtype=np.int64)
    losses_SR = np.array([each.values_R[np.searchsorted(each.tokens_R, at)] for each in curves])
    return _thinned(at, losses_SR)


def _thinned(tokens_R: np.ndarray, losses_SR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over groups of neighbors of equal size, so that a curve has at most CURVE_POINTS."""
    pieces = min(CURVE_POINTS, len(tokens_R))
    if pieces == len(tokens_R):
        return tokens_R, losses_SR
    places = np.array_split(np.arange(len(tokens_R)), pieces)
    tokens = np.array([tokens_R[place].mean() for place in places])
    return tokens, np.stack([losses_SR[:, place].mean(axis=1) for place in places], axis=1)
