"""The emulation of Hopper's asynchronous instructions detects a kernel that omits one of its
duties: norm_topk_hopper.cu, compiled without a line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_host import emulation

pytestmark = pytest.mark.full

KERNEL = emulation.CSRC / "cuda" / "norm_topk_hopper.cu"
ROOT = Path(__file__).parents[2]
RUN = (
    "import sys; from tests.cuda_host import emulation, test_norm_topk_squares as test;"
    "test.test_stages_go_round(emulation.load(sys.argv[1]), test.torch.bfloat16)"
)
EARLY = "reads what was copied since"
FAULTS = {
    "ptx::wait(barriers().full[stage], ring.parity());": EARLY,
    "ptx::order_copies_before_wgmma();": EARLY,
    "ptx::begin_wgmma();": "without a wgmma.fence",
    "ptx::wait_for_wgmma<0>();": EARLY,
    "ptx::wait_for_wgmma<1>();": EARLY,
    "ptx::arrive(barriers().empty[stage]);": "wait for others",
    "ptx::wait(barriers().empty[ring.stage()], ring.parity() ^ 1);": EARLY,
    "ptx::wait_for_all_copies();": "ended before its copies",
}


@pytest.mark.parametrize("duty", FAULTS)
def test_a_duty_left_out(library, duty, tmp_path):
    kernel = KERNEL.read_text()
    assert duty in kernel
    source = tmp_path / KERNEL.name
    source.write_text(kernel.replace(duty, "{}"))
    others = [path for path in library.parent.glob("*.o") if path.name != f"{KERNEL.name}.o"]
    faulty = emulation.link([emulation.compile_for_cpu(source, tmp_path), *others], tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN, faulty], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode != 0
    assert FAULTS[duty] in done.stderr
