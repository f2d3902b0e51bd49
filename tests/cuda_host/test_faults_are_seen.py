"""The emulation of Hopper's asynchronous instructions detects a kernel that omits one of its
duties."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

MULTIPLY = (
    "import ctypes; multiply = ctypes.CDLL({library!r}).multiply_without;"
    "multiply.restype = ctypes.c_float; print(multiply({left_out}))"
)
EARLY = "reads what was copied since"
FAULTS = {
    "wait_for_copies": EARLY,
    "order_copies": EARLY,
    "begin_products": "without a wgmma.fence",
    "wait_for_products": "ended before its products",
    "release_after_products": EARLY,
    "release_at_all": "wait for others",
    "wait_for_release": EARLY,
    "wait_for_last_copies": "ended before its copies",
}


def multiply_without(library, left_out: int) -> subprocess.CompletedProcess:
    program = MULTIPLY.format(library=str(library), left_out=left_out)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_without_a_fault(library):
    done = multiply_without(library, len(FAULTS))
    assert (done.stdout.strip(), done.stderr) == ("48.0", "")


@pytest.mark.parametrize("duty", FAULTS)
def test_a_duty_left_out(library, duty):
    done = multiply_without(library, list(FAULTS).index(duty))
    assert done.returncode != 0
    assert FAULTS[duty] in done.stderr
