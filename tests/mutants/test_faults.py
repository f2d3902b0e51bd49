"""Each fault can be applied to the present code."""

from pathlib import Path

import pytest

from tests.mutants.fault import Fault
from tests.mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_text_stands_once_in_its_file(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.old != fault.new
    assert all((ROOT / path).exists() for path in fault.near)


def test_names_are_unlike() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
