"""`import moe_parallel` loads little, and the library prints nothing, unlike Megatron-Core."""

import subprocess
import sys

import pytest

import moe_parallel

IMPORT = """
import sys, moe_parallel
assert not {"torch", "numpy", "megatron", "yaml"} & set(sys.modules), "import is not light"
assert {"AoE", "RoutedMoE", "record_routing"} <= set(dir(moe_parallel))
from moe_parallel import AoE
import torch
assert AoE(16, 4)(torch.ones(2, 16)).shape == (2, 16)
assert not torch.distributed.is_initialized()
"""


@pytest.mark.full
def test_imports_are_lazy_and_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'moe_parallel' has no attribute 'MoE'"):
        _ = moe_parallel.MoE
