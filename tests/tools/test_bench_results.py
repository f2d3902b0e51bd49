"""Numbers that are computed from samples, their storage in a file, rows as text."""

from pathlib import Path

import pytest

from tests.tools.bench_rows import read_json, result, row
from tools.bench.results import format_reasons, format_row, times_as_fast, write_json


def test_rate_and_share() -> None:
    ours = result("ours", 2, 2, 2)
    measured = row(ours, amount=3e6, ceiling=(1.5, 1.5, 1.5))
    assert measured.rate(ours) == pytest.approx(1.5)  # 3 MB in 2 ms
    assert measured.share(ours) == pytest.approx(0.75)


def test_a_ratio_is_of_neighbors_in_time() -> None:
    # The machine became three times as slow for the second turn. In each turn the other takes twice
    # as long; the medians of all turns (2 and 6) would give three times.
    ours, other = result("ours", 1, 3, 2), result("other", 2, 6, 6)
    assert times_as_fast(ours, other) == pytest.approx(2.0)


def test_json_keeps_everything(tmp_path: Path) -> None:
    rows = [
        row(result("ours", 1, 2, saved_bytes=5, peak_bytes=7)),
        row(result("ours", 1), result("other", 1, differs="output 0 is off")),
        row(result("ours", 1), result("gone", absent="needs a CUDA GPU")),
    ]
    write_json(tmp_path / "a.json", {"machine": "a machine"}, rows)
    about, read = read_json(tmp_path / "a.json")
    assert read == rows
    assert about == {"machine": "a machine"}


def test_a_row() -> None:
    text = format_row(
        row(
            result("ours", 2, 2, 2, peak_bytes=3 * 2**20, saved_bytes=2**19),
            result("loop", 3, 3, 6),
            result("wrong", 1, 1, 1, differs="output 0 is off by 1.0e+00 of its largest value"),
            result("gone", absent="needs a CUDA GPU"),
        )
    )
    title, head, ours, loop, wrong, why = text.splitlines()
    assert title == "permute forward, T=8 d=4, float32   (copy 2.0 GB/s)"
    assert head.split() == "us quartiles GB/s of max our speed peak MiB saved MiB".split()
    assert ours.split() == ["ours", "2,000.0", "[2,000", "..", "2,000]", "1.0", "50.0%",
                            "3.00", "0.50"]  # fmt: skip
    assert loop.split()[-1] == "1.50x"
    assert wrong.split()[-1] == "DIFFERS"
    assert why.strip() == "output 0 is off by 1.0e+00 of its largest value"
    assert "gone" not in text


def test_the_absent_and_what_had_no_graph_are_listed_once_by_reason() -> None:
    waits, long = "RuntimeError: called a synchronizing CUDA operation", "it takes more than 5 ms"
    ours, loop = result("ours", 1), result("loop", 1, without_graph=waits)
    rows = [
        row(ours, loop),
        row(ours, loop),
        row(result("ours", 1, without_graph=long), op="swiglu"),
    ]
    rows.append(
        row(ours, result("TE", absent="needs a GPU"), result("other", absent="needs a GPU"))
    )
    assert format_reasons(rows).splitlines() == [
        "absent:",
        "  TE, other: needs a GPU",
        "timed without a CUDA graph:",
        f"  {waits}: permute loop",
        f"  {long}: swiglu ours",
    ]
    assert format_reasons([row(ours)]) == ""
