"""The remarks of nvcc's assembler on the fused products for sm_90a. If it cannot prove that nothing
else changes the sums of wgmma, it falls back to one product at a time and prints only a remark."""

import re
import shutil
import subprocess

import pytest

from tests.cuda_host.emulation import CSRC

pytestmark = pytest.mark.full

FLAGS = ["-std=c++17", "-O3", "-DMOE_PARALLEL_CUDA", "-gencode=arch=compute_90a,code=sm_90a"]


#: The epilogues, by the mainloop that they have on Hopper.
MAINLOOPS = {"on_hopper": ["activate", "differentiate", "square", "store"]}
MAINLOOPS |= {"multiply_gated": ["activate_gate", "differentiate_gate"]}
CASES = [(loop, epilogue) for loop, epilogues in MAINLOOPS.items() for epilogue in epilogues]


@pytest.mark.parametrize(("mainloop", "epilogue"), CASES)
def test_products_stay_under_way_and_in_registers(mainloop, epilogue, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on the PATH")
    source, cubin = CSRC / "cuda" / "fused" / f"{epilogue}.cu", tmp_path / "kernels.cubin"
    command = [nvcc, *FLAGS, "-Xptxas=-v", "-cubin", source, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "wgmma.mma_async instructions are serialized" not in said
    of_kernel = rf"entry function '\w*{mainloop}.*?(\d+) bytes spill stores"
    spilled = re.findall(of_kernel, said, re.DOTALL)
    assert spilled
    assert set(spilled) == {"0"}
