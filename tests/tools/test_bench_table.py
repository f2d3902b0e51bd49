"""The printed form of a row."""

from tests.tools.bench_rows import result, row
from tools.bench.table import format_absent, format_launched, format_row


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


def test_the_absent_are_listed_once_by_reason() -> None:
    gone = result("TE", absent="needs a CUDA GPU")
    other = result("MegaBlocks", absent="needs a CUDA GPU")
    broken = result("package", absent="failed: RuntimeError: no")
    rows = [row(result("ours", 1), gone, broken), row(result("ours", 1), gone, other)]
    assert format_absent(rows).splitlines() == [
        "absent:",
        "  TE, MegaBlocks: needs a CUDA GPU",
        "  package: failed: RuntimeError: no",
    ]
    assert format_absent([row(result("ours", 1))]) == ""


def test_what_had_no_graph_is_listed_once_by_reason() -> None:
    waits, long = "RuntimeError: called a synchronizing CUDA operation", "it takes more than 5 ms"
    ours, loop = result("ours", 1), result("loop", 1, without_graph=waits)
    rows = [
        row(ours, loop),
        row(ours, loop),
        row(result("ours", 1, without_graph=long), op="swiglu"),
    ]
    assert format_launched(rows).splitlines() == [
        "timed without a CUDA graph:",
        f"  {waits}: permute loop",
        f"  {long}: swiglu ours",
    ]
    assert format_launched([row(ours)]) == ""
