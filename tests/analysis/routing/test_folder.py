"""The files of an analysis, written and read again."""

import pytest

from moe_parallel.analysis.routing import folder as files
from moe_parallel.analysis.routing.folder import (
    SelectionsFile,
    View,
    read_facts,
    read_table,
    write_facts,
    write_tables,
)
from moe_parallel.errors import InputError
from tests.analysis.routing.selections import random_selections

PARTS = [random_selections("code", 0), random_selections("a <b>", 0), random_selections("code", 3)]


@pytest.mark.parametrize("rows_of_a_group", [1, 500_000])
def test_selections_are_rows(tmp_path, monkeypatch, rows_of_a_group):
    monkeypatch.setattr(files, "ROWS_OF_A_GROUP", rows_of_a_group)
    with SelectionsFile(tmp_path) as file:
        for part in PARTS:
            file.add(part)
    table = read_table(tmp_path, "selections")
    rows = list(zip(*table.values(), strict=True))
    expected = []
    for part in PARTS:
        for layer in part.layers:
            for place in range(len(part)):
                kept = layer.experts_TK[place] >= 0
                expected.append(
                    (
                        part.text, part.sample_T[place], part.position_T[place],
                        part.token_T[place], layer.layer,
                        layer.experts_TK[place][kept].tolist(),
                        layer.probs_TK[place][kept].tolist(),
                        layer.dropped_T[place], layer.entropy_T[place],
                    )
                )  # fmt: skip
    assert rows == expected and len(rows) == 3 * 15 * 2


def test_the_view_keeps_the_first_tokens_of_each_text():
    view = View(18)
    for part in PARTS:
        view.add(part)
    assert view.columns["text"] == ["code"] * 15 + ["a <b>"] * 15 + ["code"] * 3
    assert view.columns["sample"][-3:] == [3, 3, 3]
    used = (PARTS[2].layers[1].experts_TK[2] >= 0).sum()
    assert view.columns["used"][-1][1] == used and len(view.columns["best"][0]) == 2


def test_tables_and_facts(tmp_path):
    write_tables(tmp_path, {"one": {"a": [1, 2], "b": ["x", None]}})
    assert read_table(tmp_path, "one") == {"a": [1, 2], "b": ["x", None]}
    write_facts(tmp_path, {"tokens": {"t": 3}})
    assert read_facts(tmp_path) == {"tokens": {"t": 3}}


def test_what_is_missing_or_damaged(tmp_path):
    for name, text in (("torn", "PAR1 and no more"), ("empty", "")):
        (tmp_path / f"{name}.parquet").write_text(text)
    for name in ("gone", "torn", "empty"):
        with pytest.raises(InputError, match=f"{name}.parquet is missing or damaged: repeat"):
            read_table(tmp_path, name)
    with pytest.raises(InputError, match=r"analysis.json cannot be read: repeat"):
        read_facts(tmp_path)
    (tmp_path / "analysis.json").write_text("[]")
    with pytest.raises(InputError, match=r"analysis.json cannot be read: repeat"):
        read_facts(tmp_path)


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match="needs pyarrow, which is not installed: pip install"):
        SelectionsFile(tmp_path)
