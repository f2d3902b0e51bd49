"""The report of a study: tables and figures, created only from the files of its runs."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from moe_parallel.analysis.study.folder import StudyFolder
from moe_parallel.analysis.study.loss_figure import draw_losses
from moe_parallel.analysis.study.results import StudyResults
from moe_parallel.analysis.study.routing_figures import (
    draw_domain_weights,
    draw_experts_per_token,
    draw_loads,
    draw_norms,
)
from moe_parallel.analysis.study.table import cell_csv, contender_csv, markdown, study_json
from moe_parallel.errors import InputError

FIGURES = {
    "loss": draw_losses,
    "load": draw_loads,
    "norms": draw_norms,
    "experts_per_token": draw_experts_per_token,
    "domain_weights": draw_domain_weights,
}


def write_study_report(folder: StudyFolder) -> Path:
    """Write the tables and figures of the finished runs. Returns the page to read, table.md.

    Raises InputError if no run is finished, or if the folder cannot be written.
    """
    study = StudyResults.read(folder)
    drawn = {name: draw(study) for name, draw in FIGURES.items()}
    pictures = {name: figure for name, figure in drawn.items() if figure is not None}
    page = markdown(study)
    page += "".join(f"\n![{name.replace('_', ' ')}](figures/{name}.png)\n" for name in pictures)
    texts = {
        "table.md": page,
        "table.csv": contender_csv(study),
        "cells.csv": cell_csv(study),
        "table.json": study_json(study),
    }
    try:
        for name, text in texts.items():
            (folder.path / name).write_text(text, encoding="utf-8")
        _save(pictures, folder.path / "figures")
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be written ({error.strerror}): free space, or change the "
            "permissions"
        ) from error
    return folder.path / "table.md"


def _save(pictures: dict[str, Figure], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in FIGURES.keys() - pictures.keys():  # left by an earlier report
        (folder / f"{name}.png").unlink(missing_ok=True)
    for name, figure in pictures.items():
        figure.savefig(folder / f"{name}.png", dpi=120)
