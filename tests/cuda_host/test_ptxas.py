"""The remarks of nvcc's assembler on the products for sm_90a. If it cannot prove that nothing else
changes the sums of wgmma, it falls back to one product at a time and prints only a remark."""

import re
import shutil
import subprocess

import pytest

from tests.cuda_host.emulation import CSRC

pytestmark = pytest.mark.full

FLAGS = ["-std=c++17", "-O3", "-DMOE_PARALLEL_CUDA", "-gencode=arch=compute_90a,code=sm_90a"]


def test_products_stay_under_way_and_in_registers(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on the PATH")
    source, cubin = CSRC / "cuda" / "norm_topk_hopper.cu", tmp_path / "kernels.cubin"
    (tmp_path / "build_config.h").write_text("#define MOE_PARALLEL_BUILT_FOR_HOPPER true")
    command = [nvcc, *FLAGS, "-Xptxas=-v", f"-I{tmp_path}", "-cubin", source, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "wgmma.mma_async instructions are serialized" not in said
    of_kernel = r"entry function '\w*sum_squares.*?(\d+) bytes spill stores"
    assert re.findall(of_kernel, said, re.DOTALL) == ["0", "0"]  # in bf16 and fp16
