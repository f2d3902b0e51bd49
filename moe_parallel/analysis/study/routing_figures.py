"""The routing of a study's contenders: four figures modeled on those of the papers.

A figure of single experts shows the run with the first seed: expert 3 of one run is not expert 3 of
another, so a mean over seeds would mean nothing. A figure is None if no contender has its measure.
"""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from moe_parallel.analysis.run_figure import LOAD_COLORS, LOAD_NORM, STYLE
from moe_parallel.analysis.run_history import layer_numbers
from moe_parallel.analysis.study.figure_style import (
    BAND_ALPHA,
    REFERENCE_COLOR,
    contender_style,
    count_ticks,
    domain_color,
    grid,
    layer_colors,
    new_figure,
    token_axis,
)
from moe_parallel.analysis.study.results import Result, StudyResults

MOST_NUMBERED_CELLS = 40
MOST_SHOWN_LAYERS = 3


def draw_loads(study: StudyResults) -> Figure | None:
    """The load of each expert of each layer, a map for each contender. [AoE, Fig. 3]"""
    histories = [(result, result.first.routing) for result in study.results]
    shown = [(result, it.final_relative_load_GE()) for result, it in histories if it is not None]
    if not shown:
        return None
    rows, columns = grid(len(shown), 4)
    height = max(1.6, 0.26 * max(len(load) for _, load in shown))
    with matplotlib.rc_context(STYLE):
        figure = new_figure(
            3.3 * columns + 1,
            (height + 1) * rows + 0.6,
            f"{study.name}: load of the experts",
            "In training, at the end of the run with the first seed; entropies: mean ± standard "
            "deviation over the seeds.",
        )
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, (result, load_GE) in zip(panels.flat, shown, strict=False):
            _draw_load(axes, result, load_GE)
        for axes in panels.flat[len(shown) :]:
            axes.set_axis_off()
        bar = figure.colorbar(
            ScalarMappable(LOAD_NORM, LOAD_COLORS), ax=panels, aspect=30, extend="max"
        )
        bar.set_label("load, multiples of an even share")
    return figure


def draw_norms(study: StudyResults) -> Figure | None:
    """The mean norm of every expert over training, colored by layer. [AoE, Fig. 4]"""
    shown = [(r, norms) for r in study.results if (norms := r.first.norms_RGE()) is not None]
    if not shown:
        return None
    rows, columns = grid(len(shown), 3)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(
            4.4 * columns + 1,
            3.4 * rows + 0.8,
            f"{study.name}: norms by which experts choose themselves",
            "A line for each expert: its mean over all tokens, in the run with the first seed.",
        )
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, (result, (tokens_R, norms_RGE)) in zip(panels.flat, shown, strict=False):
            colors = layer_colors(norms_RGE.shape[1])
            for layer, expert in np.ndindex(*norms_RGE.shape[1:]):
                axes.plot(tokens_R, norms_RGE[:, layer, expert], color=colors[layer], lw=0.9)
            axes.set(title=result.name, ylabel="mean norm")
            axes.set_ylim(bottom=0)
            token_axis(axes)
        for axes in panels.flat[len(shown) :]:
            axes.set_axis_off()
        _layer_bar(figure, panels, layer_numbers(shown[0][0].first.training[-1]["layers"]))
    return figure


def draw_experts_per_token(study: StudyResults) -> Figure | None:
    """Experts per token by layer, a panel for each held-out domain. [Dynamic routing, Fig. 4]

    A contender is a line if the number varies; the legend lists the others.
    """
    counted = {
        place: counts
        for place, result in enumerate(study.results)
        if (counts := [run.history.held_out("experts_per_token") for run in result.runs.values()])
        and all(counts)
    }
    varying = [
        place
        for place, counts in counted.items()
        if np.ptp(np.concatenate([values_G for of in counts for values_G in of.values()])) > 1e-6
    ]
    if not varying:
        return None
    with matplotlib.rc_context(STYLE):
        figure = new_figure(
            4.4 * len(study.domains) + 1.6,
            4.2,
            f"{study.name}: experts per token",
            "On held-out text, at the end. Lines: mean over seeds; bands: lowest to highest.",
        )
        panels = figure.subplots(1, len(study.domains), sharey=True, squeeze=False)[0]
        for axes, domain in zip(panels, study.domains, strict=True):
            for place in varying:
                values_SG = np.array([of_run[domain] for of_run in counted[place]])
                _draw_counts(axes, study.results[place], place, values_SG)
            for level, names in _fixed(study, counted, varying).items():
                label = f"{level:g} in every layer:\n" + "\n".join(f"  {name}" for name in names)
                axes.axhline(level, color=REFERENCE_COLOR, lw=1, ls=":", label=label)
            axes.set(title=f"held out, {domain}", xlabel="layer")
            axes.set_ylim(bottom=0)
        panels[0].set_ylabel("experts per token")
        figure.legend(handles=panels[0].get_lines(), loc="outside right upper", handlelength=3)
    return figure


def draw_domain_weights(study: StudyResults) -> Figure | None:
    """The mean routing weight of each expert by held-out domain, in three layers. [Lory, Fig. 6]"""
    shown = [r for r in study.results if r.first.held_out("routing_weight_per_expert")]
    if not shown:
        return None
    numbers = layer_numbers(next(iter(shown[0].first.final.values()))["layers"])
    chosen = sorted({0, len(numbers) // 2, len(numbers) - 1})[:MOST_SHOWN_LAYERS]
    with matplotlib.rc_context(STYLE):
        figure = new_figure(
            4.2 * len(chosen) + 1.2,
            2.5 * len(shown) + 0.9,
            f"{study.name}: routing weight by domain",
            "Of each expert in the merged one, mean over held-out tokens, in the run with the "
            "first seed.",
        )
        panels = figure.subplots(len(shown), len(chosen), sharey=True, squeeze=False)
        for row, result in zip(panels, shown, strict=True):
            for axes, layer in zip(row, chosen, strict=True):
                _draw_weights(axes, result, layer)
                axes.set_title(f"{result.name}, layer {numbers[layer]}")
            row[0].set_ylabel("mean weight")
        for axes in panels[-1]:
            axes.set_xlabel("expert")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _draw_load(axes: Axes, result: Result, load_GE: np.ndarray) -> None:
    axes.imshow(load_GE, cmap=LOAD_COLORS, norm=LOAD_NORM, aspect="auto", interpolation="none")
    if load_GE.size <= MOST_NUMBERED_CELLS:
        for layer, expert in np.ndindex(*load_GE.shape):
            value = load_GE[layer, expert]
            color = "white" if abs(value - 1) > 0.7 else "black"
            axes.text(expert, layer, f"{value:.1f}", ha="center", va="center", color=color, size=8)
    entropies = []
    for name, title in (("ent_load", "Ent_load"), ("ent_conf", "Ent_conf")):
        if (spread := result.spreads.get(name)) is not None:
            text = f"{title} {spread.mean:.3f}"
            entropies.append(
                text + ("" if spread.deviation is None else f" ± {spread.deviation:.3f}")
            )
    axes.set_title("\n".join([result.name, *entropies]), fontsize=10)
    axes.set(xlabel="expert", ylabel="layer")
    count_ticks(axes, "x", range(load_GE.shape[1]))
    count_ticks(axes, "y", layer_numbers(result.first.training[-1]["layers"]))
    axes.grid(False)


def _draw_counts(axes: Axes, result: Result, place: int, values_SG: np.ndarray) -> None:
    layers = layer_numbers(next(iter(result.first.final.values()))["layers"])
    style = contender_style(place)
    axes.plot(layers, values_SG.mean(axis=0), label=result.name, lw=1.4, markersize=5, **style)
    if len(values_SG) > 1:
        low_G, high_G = values_SG.min(axis=0), values_SG.max(axis=0)
        axes.fill_between(layers, low_G, high_G, color=style["color"], alpha=BAND_ALPHA, lw=0)
    axes.set_xticks(layers[:: max(1, len(layers) // 8)])


def _fixed(
    study: StudyResults, counted: dict[int, list[dict[str, np.ndarray]]], varying: list[int]
) -> dict[float, list[str]]:
    """The numbers that are the same everywhere for some contenders, with the contenders' names."""
    names: dict[float, list[str]] = {}
    for place in counted.keys() - varying:
        level = float(next(iter(counted[place][0].values()))[0])
        names.setdefault(round(level, 3), []).append(study.results[place].name)
    return names


def _draw_weights(axes: Axes, result: Result, layer: int) -> None:
    by_domain = result.first.held_out("routing_weight_per_expert")
    width = 0.8 / len(by_domain)
    for place, (domain, weights_GE) in enumerate(by_domain.items()):
        experts = np.arange(weights_GE.shape[1])
        offset = (place - (len(by_domain) - 1) / 2) * width
        axes.bar(experts + offset, weights_GE[layer], width, color=domain_color(place),
                 label=domain)  # fmt: skip
    number = weights_GE.shape[1]
    axes.axhline(1 / number, color="black", ls="--", lw=0.8)
    count_ticks(axes, "x", range(number))
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)


def _layer_bar(figure: Figure, panels: np.ndarray, layers: list[int]) -> None:
    colors = ListedColormap(list(layer_colors(len(layers))))
    norm = BoundaryNorm(np.arange(len(layers) + 1) - 0.5, len(layers))
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=panels, aspect=30, label="layer")
    shown = list(range(0, len(layers), -(-len(layers) // 8)))
    bar.set_ticks(shown, labels=[str(layers[index]) for index in shown])
    bar.ax.minorticks_off()
    bar.ax.invert_yaxis()
