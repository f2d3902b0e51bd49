"""The table that the tests of faults write into a page."""

from pathlib import Path

from tests.cluster.fault_cases import FAULTS, MOMENTS, not_tested, proven
from tests.cluster.fault_table import BEGIN, END, HEAD, NO_CASE, FaultTable, cells_of

RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"

ROW = "| kill | 9 s | – | – | – | Slurm | `a \\| b` |\n"


def page_with(folder, rows):
    page = folder / "page.md"
    page.write_text(f"before\n{BEGIN}{HEAD}{rows}{END}after\n", encoding="utf-8")
    return page


def test_cells_are_renewed_and_those_of_cases_that_were_not_run_stay(tmp_path):
    cut = "| cut | – | 3 s | – | 8 s | - | `c` |\n"
    page = page_with(tmp_path, ROW + cut + ROW.replace("kill", "stop"))
    table = FaultTable()
    table.add(("cut", "in a step"), "new", "-", 4.4)
    table.add(("kill", "in a save"), "x | y", "Slurm", 7)
    table.add(("lose", "at start"), "z", "the user", 1)
    table.write(page)
    assert page.read_text(encoding="utf-8") == (
        f"before\n{BEGIN}{HEAD}"
        "| kill | 9 s | – | 7 s | – | Slurm | `x \\| y` |\n"
        "| cut | – | 4 s | – | 8 s | - | `new` |\n"
        "| stop | 9 s | – | – | – | Slurm | `a \\| b` |\n"
        "| lose | 1 s | – | – | – | the user | `z` |\n"
        f"{END}after\n"
    )
    assert cells_of(page)["kill", "in a save"] == "7 s"


def test_what_differs_between_runs_is_left_out(tmp_path):
    page = page_with(tmp_path, "")
    table = FaultTable()
    table.add(("kill", "at start"), "/tmp/x1/run at 2026-01-02T03:04:05", "Slurm", 1)
    table.write(page)
    assert "`runs/my at ...`" in page.read_text(encoding="utf-8")


def test_the_page_has_a_time_for_each_case_and_a_dash_for_each_other_combination():
    cells = cells_of(RELIABILITY)
    assert {case for case, cell in cells.items() if cell != NO_CASE} == proven()
    assert {case for case, cell in cells.items() if cell == NO_CASE} == set(not_tested())


def test_every_fault_meets_every_moment_or_has_a_reason():
    reasons = not_tested()
    assert all(reasons.values())
    for fault in FAULTS:
        for moment in MOMENTS:
            case = (fault.name, moment)
            assert (case in proven()) != (case in reasons)
