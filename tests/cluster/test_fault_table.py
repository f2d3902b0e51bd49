"""The table that the tests of faults write into a page."""

from pathlib import Path

from tests.cluster.fault_cases import ELSEWHERE, FAULTS, MOMENTS, not_tested, proven
from tests.cluster.fault_table import (
    BEGIN,
    END,
    HEAD,
    FaultTable,
    not_tested_of,
    not_tested_rows,
    rows_of,
)

RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"

ROW = "| kill | at start | `a \\| b` | Slurm | 9 s | 60 s |\n"


def page_with(folder, rows):
    page = folder / "page.md"
    page.write_text(f"before\n{BEGIN}{HEAD}{rows}{END}after\n")
    return page


def test_rows_are_renewed_and_those_of_cases_that_were_not_run_stay(tmp_path):
    page = page_with(tmp_path, ROW + "| cut | in a step | `c` | - | 3 s | 60 s |\n")
    table = FaultTable()
    table.add(("cut", "in a step"), "new", "-", 4.4, 60)
    table.add(("kill", "in a save"), "x | y", "Slurm", 7, 90)
    table.write(page)
    assert page.read_text() == (
        f"before\n{BEGIN}{HEAD}{ROW}"
        "| kill | in a save | `x \\| y` | Slurm | 7 s | 90 s |\n"
        "| cut | in a step | `new` | - | 4 s | 60 s |\n"
        f"{END}after\n"
    )


def test_what_differs_between_runs_is_left_out(tmp_path):
    page = page_with(tmp_path, "")
    table = FaultTable()
    table.add(("kill", "at start"), "/tmp/x1/run at 2026-01-02T03:04:05", "Slurm", 1, 60)
    table.write(page)
    assert "`runs/my at ...`" in page.read_text()


def test_the_page_has_a_row_for_each_case():
    assert rows_of(RELIABILITY) == proven()


def test_the_page_says_why_the_other_combinations_have_no_case():
    assert not_tested_of(RELIABILITY) == not_tested_rows(not_tested() | ELSEWHERE)


def test_every_fault_meets_every_moment_or_has_a_reason():
    reasons = not_tested()
    assert all(reasons.values())
    for fault in FAULTS:
        for moment in MOMENTS:
            case = (fault.name, moment)
            assert (case in proven()) != (case in reasons)


def test_the_files_that_the_reasons_name_exist():
    for reason in ELSEWHERE.values():
        for word in reason.replace(",", " ").replace(";", " ").split():
            if word.startswith("tests/"):
                assert (RELIABILITY.parents[1] / word).exists()
