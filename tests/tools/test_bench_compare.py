"""The comparison of two runs."""

from pathlib import Path

import pytest

from tests.tools.bench_rows import result, row
from tools.bench.compare import compare, main
from tools.bench.results import write_json

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
    assert "  loop                        only before" in text
    assert "  new                         only after" in text
    assert "te  " not in text
    assert "only before: swiglu forward, T=8 d=4, float32" in text
    assert "only after: norm_topk forward, T=8 d=4, float32" in text


def test_no_speed_where_outputs_differed() -> None:
    wrong = row(result("ours", 1), result("loop", 1, differs="output 0 is off"))
    right = row(result("ours", 1), result("loop", 1))
    assert "  loop                        DIFFERS after" in compare([right], [wrong])
    assert "  loop                        DIFFERS before" in compare([wrong], [right])


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
