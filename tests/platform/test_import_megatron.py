"""A program's first import of Megatron-Core leaves Inductor and wandb out, and torch as it was."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import torch
compile_before = torch.compile
from moe_parallel.platform.import_megatron import import_megatron
import_megatron()
import moe_parallel.training.pretrain
print(*sys.modules)
assert torch.compile is compile_before
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(1)).item() == 2
import wandb
"""


@pytest.mark.full  # Inductor would cost each process a second, and no more
def test_inductor_and_wandb_are_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.split()
    assert "megatron.core.optimizer" in modules
    assert not {"torch._inductor.compile_fx", "matplotlib", "wandb"} & set(modules)
