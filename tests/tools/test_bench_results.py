"""Numbers that are computed from samples, their storage in a file, rows as text, comparisons."""

from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from tests.tools.bench_rows import result, row
from tools.bench.compare import compare, main
from tools.bench.results import format_reasons, format_row, read_json, times_as_fast, write_json


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


def test_a_row_of_models() -> None:
    text = format_row(
        row(result("ours", 2, 2, peak_bytes=3 * 2**20, saved_bytes=2**19), result("other", 3, 3)),
        tokens=4000,
        weights={"ours": 1_250_000, "other": 1_000_000},
    )
    title, head, ours, other = text.splitlines()
    assert title == "permute forward, T=8 d=4, float32   (copy 2.0 GB/s)"
    assert head.split()[:4] == ["ms", "quartiles", "tokens/s", "of"]
    assert ours.split() == ["ours", "2.0", "[2", "..", "2]", "2,000,000", "50.0%",
                            "3.00", "0.50", "1.25M"]  # fmt: skip
    assert other.split()[-2:] == ["1.50x", "1.00M"]


def test_the_absent_are_listed_once_by_reason() -> None:
    gone = result("TE", absent="needs a CUDA GPU")
    other = result("MegaBlocks", absent="needs a CUDA GPU")
    broken = result("package", absent="failed: RuntimeError: no")
    rows = [row(result("ours", 1), gone, broken), row(result("ours", 1), gone, other)]
    assert format_reasons(rows).splitlines() == [
        "absent:",
        "  TE, MegaBlocks: needs a CUDA GPU",
        "  package: failed: RuntimeError: no",
    ]


def test_what_had_no_graph_is_listed_once_by_reason() -> None:
    waits, long = "RuntimeError: called a synchronizing CUDA operation", "it takes more than 5 ms"
    ours, loop = result("ours", 1), result("loop", 1, without_graph=waits)
    rows = [
        row(ours, loop),
        row(ours, loop),
        row(result("ours", 1, without_graph=long), op="swiglu"),
    ]
    assert format_reasons(rows).splitlines() == [
        "timed without a CUDA graph:",
        f"  {waits}: permute loop",
        f"  {long}: swiglu ours",
    ]
    assert format_reasons([row(ours)]) == ""


ABOUT = {"command": "run.py", "date": "a day", "machine": "a machine"}


def test_speed_share_and_memory() -> None:
    before = row(result("ours", 4, 4, 4, peak_bytes=100, saved_bytes=10))
    after = row(result("ours", 2, 2, 2, peak_bytes=150, saved_bytes=10))
    line = compare([before], [after]).splitlines()[3]
    assert line.split() == ["ours", "4,000.0", "2,000.0", "2.00x", "25.0%", "50.0%",
                            "+50.0%", "="]  # fmt: skip


@pytest.mark.parametrize(("samples", "mark"), [((3, 5, 7), True), ((6, 6, 7), False)])
def test_a_change_within_the_spread_is_marked(samples: tuple[float, ...], mark: bool) -> None:
    before, after = row(result("ours", 2, 4, 6)), row(result("ours", *samples))
    assert ("x ~" in compare([before], [after])) is mark


def test_what_only_one_run_has() -> None:
    before = [
        row(result("ours", 1), result("loop", 1), result("te", absent="no GPU")),
        row(result("ours", 1), op="swiglu"),
    ]
    after = [
        row(result("ours", 1), result("loop", absent="broken"), result("new", 1)),
        row(result("ours", 1), op="norm_topk"),
    ]
    text = compare(before, after)
    assert "  loop                            only before" in text
    assert "  new                             only after" in text
    assert "te  " not in text
    assert "only before: swiglu forward, T=8 d=4, float32" in text
    assert "only after: norm_topk forward, T=8 d=4, float32" in text


def test_no_speed_where_outputs_differed() -> None:
    wrong = row(result("ours", 1), result("loop", 1, differs="output 0 is off"))
    right = row(result("ours", 1), result("loop", 1))
    assert "  loop                            DIFFERS after" in compare([right], [wrong])
    assert "  loop                            DIFFERS before" in compare([wrong], [right])


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    write_json(path, ABOUT, [row(result("ours", 1))])
    assert main([str(path), str(path)]) == 0
    assert "1.00x ~" in capsys.readouterr().out
    assert main([str(path), str(tmp_path / "nowhere.json")]) == 2
    assert capsys.readouterr().err.endswith(
        "nowhere.json cannot be read: No such file or directory\n"
    )
    assert main([str(path)]) == 2
    assert "compare.py: the following arguments are required: AFTER.json" in capsys.readouterr().err
