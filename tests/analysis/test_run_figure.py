"""The figure of a run, for runs of unusual shapes, and the history that the figure shows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from moe_parallel.analysis.run_figure import draw_run, plot_run
from moe_parallel.analysis.run_history import RunHistory
from moe_parallel.errors import InputError
from tests.analysis.synthetic import synthetic_run

ROOT = Path(__file__).resolve().parents[2]
FULL = pytest.mark.full


def panels(figure: Figure) -> dict:
    """The axes by the first words of their titles; color bars have no title."""
    return {axes.get_title(loc="left").split(",")[0]: axes for axes in figure.axes}


def labels(axes) -> list[str]:
    return [line.get_label() for line in axes.lines if not line.get_label().startswith("_")]


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of titles, axis labels, tick labels and notes that overlap."""
    figure.savefig("/dev/null", format="png", dpi=100)
    texts = [figure._suptitle]
    for axes in figure.axes:
        texts += [axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=True)
            texts += [tick.label1 for tick, place in ticks if low <= place <= high]
            texts += [tick.label2 for tick in axis.get_major_ticks()]  # the labels of a color bar
    renderer = figure._get_renderer()
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in texts
        if text.get_text() and text.get_visible()
    ]
    inside = [(text, box) for text, box in boxes if figure.bbox.overlaps(box)]
    return [
        (inside[i][0], inside[j][0])
        for i in range(len(inside))
        for j in range(i)
        if inside[i][1].overlaps(inside[j][1])
    ]


def test_panels_and_series_of_an_ordinary_run():
    figure = draw_run(synthetic_run(layers=4), "quickstart", "AoE, 12.3M parameters")
    assert figure._suptitle.get_text() == "quickstart"
    shown = panels(figure)
    loss = shown["Loss (value at the end)"]
    assert loss.get_xlabel() == "iteration" and loss.get_ylabel() == "loss, nats per token"
    assert [label.split("  ")[0] for label in labels(loss)] == [
        "training",
        "validation, code",
        "validation, prose",
    ]
    assert "bits/byte" in labels(loss)[1]
    for name in ("Ent_load: evenness of the load", "Ent_conf: low is a confident choice"):
        assert labels(shown[name]) == ["layer 1", "layer 2", "layer 3", "layer 4"]
        assert shown[name].get_ylabel().endswith("nats")
        assert [text.get_text() for text in shown[name].texts] == ["ceiling ln 8 = 2.079"]
        ceiling = shown[name].lines[-1].get_ydata()
        assert ceiling == pytest.approx([math.log(8)] * 2)
    assert len(shown["Load of each expert"].texts) == 4 * 8
    subtitle = figure.subfigs[0]._suptitle.get_text()
    assert subtitle == (
        "AoE, 12.3M parameters  ·  4 MoE layers of 8 autonomous experts  ·  600 iterations  ·  "
        "2.5M tokens"
    )


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"logged": 1, "layers": 1, "experts": 2, "domains": ()}, marks=FULL),
        {"logged": 300, "layers": 24, "experts": 64, "every": 500, "dropped": 9, "norms": False},
        pytest.param({"logged": 20, "layers": 3, "experts": 1}, marks=FULL),
        pytest.param({"logged": 30, "domains": tuple(f"domain{i}" for i in range(9))}, marks=FULL),
    ],
    ids=["one record", "64 experts", "one expert", "nine domains"],
)
def test_any_shape_is_drawn_without_overlap(shape):
    figure = draw_run(synthetic_run(**shape), "a run")
    assert overlapping_texts(figure) == []
    assert len(panels(figure)) == 6  # five, and the color bars without a title


def test_least_even_layer_is_the_one_shown_over_time():
    records = synthetic_run(logged=20, layers=3, experts=4)
    for record in records:
        record["layers"][1].update(tokens_per_expert=[100, 0, 0, 0], ent_load=0.0)
    shown = panels(draw_run(records, "a run"))
    mesh = shown["Load over the run in layer 2"].collections[0]
    expected = np.repeat([[4.0], [0], [0], [0]], 20, axis=1)
    np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(4, 20), expected)
    image = shown["Load of each expert"].images[0]
    np.testing.assert_allclose(image.get_array()[1], [4, 0, 0, 0])


def test_a_dense_run_has_only_a_loss():
    records = [{"iteration": 10 * i, "lm_loss": 5.0 - i} for i in range(1, 4)]
    figure = draw_run(records, "dense")
    assert list(panels(figure)) == ["Loss (value at the end)"]
    assert "routed" not in figure.subfigs[0]._suptitle.get_text()


def test_a_loss_that_was_not_finite_is_a_gap():
    records = synthetic_run(logged=150)
    records[70]["lm_loss"] = None
    history = RunHistory.from_records(records)
    assert np.flatnonzero(np.isnan(history.train_loss.values_R)).tolist() == [70]
    line = panels(draw_run(records, "gap"))["Loss (value at the end)"].lines[1]
    assert np.isfinite(line.get_ydata()).all()  # the smoothed line has no gap
    flat = [{"iteration": i, "lm_loss": 2.5} for i in range(1, 301)]
    line = panels(draw_run(flat, "flat"))["Loss (value at the end)"].lines[1]
    np.testing.assert_allclose(line.get_ydata(), 2.5)


def test_iterations_done_twice_are_drawn_once():
    first, again = synthetic_run(logged=30), synthetic_run(logged=40)[20:]
    for record in again:
        record["lm_loss"] = 1.0
    history = RunHistory.from_records(first + again)
    assert history.train_loss.iterations_R.tolist() == list(range(10, 410, 10))
    assert history.train_loss.values_R[20:].tolist() == [1.0] * 20
    assert history.train_loss.values_R[19] == first[19]["lm_loss"]


def run_folder(folder: Path, records: list[dict]) -> Path:
    folder.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def test_plot_run_that_cannot_write(tmp_path):
    folder = run_folder(tmp_path / "run", synthetic_run(logged=2))
    path = plot_run(folder)
    assert path == folder / "run.png" and path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="cannot write the picture .*make room"):
        plot_run(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no metrics.jsonl"), ("", "is empty"), ("nonsense\n", "line 1 is damaged")],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        plot_run(tmp_path)
    assert "\n" not in str(caught.value)
