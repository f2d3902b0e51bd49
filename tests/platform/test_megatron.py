"""A program's first import of Megatron-Core leaves Inductor and wandb out, and torch as it was."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.platform.megatron import SUPPORTED, check_megatron_version, check_muon

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import torch
compile_before = torch.compile
from moe_parallel.platform.megatron import import_megatron
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


@pytest.mark.parametrize("version", ["0.15.0", "0.16.0", "0.20.0", "1.0"])
def test_refused(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    message = rf"megatron-core {version} is installed.*pip install 'megatron-core>=0\.16\.1"
    with pytest.raises(InputError, match=message):
        check_megatron_version()


def test_the_range_is_that_of_pyproject():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"megatron-core{SUPPORTED}" in project["dependencies"]


def test_one_line_tells_what_muon_needs(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.2")
    message = r"^--optimizer muon needs megatron-core >=0.19.* and 0.18.2 is .*pip install 'megatr"
    with pytest.raises(InputError, match=message):
        check_muon()
    monkeypatch.setattr(metadata, "version", lambda name: "0.19.2")
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    message = r"^--optimizer muon needs emerging_optimizers.*pip install 'moe-parallel.muon.'$"
    with pytest.raises(InputError, match=message):
        check_muon()
