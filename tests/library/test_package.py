"""`import moe_parallel` loads little, and the library prints nothing, unlike Megatron-Core."""

import subprocess
import sys

IMPORT = """
import sys, moe_parallel
assert not {"torch", "numpy", "megatron", "yaml"} & set(sys.modules), "import is not light"
assert {"AoE", "RoutedMoE", "record_routing"} <= set(dir(moe_parallel))
from moe_parallel import AoE, RoutedMoE
from moe_parallel.systems import TopKSelection
import torch
options = TopKSelection(moe_shared_expert_intermediate_size=8, moe_input_jitter_eps=0.1)
for moe in AoE(16, 4), RoutedMoE(16, 4, selection=options):
    (moe(torch.ones(2, 16)).sum() + moe.aux_loss).backward()
assert not torch.distributed.is_initialized()
heavy = {"megatron", "wandb", "torch._inductor"} & set(sys.modules)
assert not heavy, heavy
"""


def test_imports_are_lazy_and_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
