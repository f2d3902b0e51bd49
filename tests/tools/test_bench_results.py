"""Numbers that are computed from samples, and their storage in a file."""

from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from tests.tools.bench_rows import result, row
from tools.bench.results import read_json, times_as_fast, write_json


def test_median_and_quartiles() -> None:
    measured = result("ours", 4, 1, 2, 3, 100)
    assert measured.median == pytest.approx(3e-3)
    assert measured.quartiles == pytest.approx((2e-3, 4e-3))
    assert result("ours", 7).quartiles == pytest.approx((7e-3, 7e-3))


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
    assert about == {"format": 1, "machine": "a machine"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a file of `run.py --json`"),
        ("[]", "is not a file of `run.py --json`"),
        ('{"rows": []}', "is not a file of `run.py --json`"),
        ('{"format": 1, "rows": [{"op": "permute"}]}', "is not a file of `run.py --json`"),
        ('{"format": 2, "rows": []}', "has format 2; this tool reads 1"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_json(path)
