"""The launcher's flags are separated from the program's."""

import pytest

from moe_parallel.config.parser import divide
from moe_parallel.errors import InputError
from moe_parallel.launch.launcher import Launcher


def test_flags_are_found_wherever_they_are():
    options = divide("--data-path a b --nproc_per_node=2 --lr 3 --max-restarts 1 --bf16".split())
    assert options.program == ("--data-path", "a", "b", "--lr", "3", "--bf16")
    assert options.flag == "--nproc-per-node"
    assert (options.processes, options.max_restarts) == ("2", 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-restarts x", "--max-restarts: invalid int value: 'x'"),
        ("--max-restarts -1", "--max-restarts is -1: it must be at least 0"),
        ("--nproc-per-node many", "--nproc-per-node is many: it must be a number, or auto, cpu"),
        ("--nproc-per-node=-1", "--nproc-per-node is -1: it must be"),
        ("--nnodes 2", "--nnodes is a flag of torchrun: start several nodes by srun"),
        ("--rdzv_backend=c10d", "--rdzv_backend is a flag of torchrun: "),
    ],
)
def test_wrong_values(line, message):
    with pytest.raises(InputError, match=message):
        divide(line.split())


def test_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(InputError, match="--nproc-per-node is gpu, and torch finds no GPU here"):
        Launcher(divide(["--nproc-per-node", "gpu"]), "program.py")
