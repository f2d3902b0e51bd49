"""Train every system of examples/systems on a GPU, and compare its losses with those of the CPU.

    python tools/gpu/systems.py --json systems.json      # one GPU; minutes

A run on the CPU saves a checkpoint after its first iteration. From there the CPU and the GPU
continue in fp32 with the same text, so that their losses differ by rounding only, as long as no
token is near a tie between experts. The GPU then trains from the beginning in bf16. Several systems
train at the same time, so their times say nothing about speed. Exit codes: 0 every system trains
and its losses agree within --tolerance, 1 some do not, 2 a wrong flag, or no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import METRICS_FILE, read_metrics
from moe_parallel.tool import Tool, check_positive, last_line
from tools.bench.benchmark import ROOT, check_device

SYSTEMS = ROOT / "examples" / "systems"
ON_ONE_DEVICE = (
    "--expert-model-parallel-size", "1", "--tensor-model-parallel-size", "1",
    "--global-batch-size", "8", "--lr-warmup-iters", "2", "--log-interval", "1",
    "--eval-interval", "100000",
)  # fmt: skip
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass
class SystemRow:
    """The losses of one system; `error`: the last line of a run that failed."""

    system: str
    cpu: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)
    gpu_bf16: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def difference(self) -> float:
        """The largest difference of a loss, relative to the CPU's; inf if losses are missing."""
        if not self.cpu or len(self.cpu) != len(self.gpu):
            return float("inf")
        return max(abs(gpu / cpu - 1) for cpu, gpu in zip(self.cpu, self.gpu, strict=True))

    def agrees(self, tolerance: float) -> bool:
        learns = bool(self.gpu_bf16) and self.gpu_bf16[-1] < self.gpu_bf16[0]
        return not self.error and self.difference <= tolerance and learns


class RunFailed(Exception):
    """A run of the training program ended with an error; the message is its last line."""


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument(
        "--iterations", metavar="N", type=int, default=6, help="of a run in fp32 (default: 6)"
    )
    tool.add_argument("--bf16-iterations", metavar="N", type=int, default=20, help="(default: 20)")
    tool.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=1e-3,
        help="the largest relative difference of a loss (default: 0.001)",
    )
    tool.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="systems at the same time (default: half as many as cores)",
    )
    tool.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        help="files of examples/systems, without .yaml (default: all)",
    )
    tool.add_argument("--json", metavar="FILE", type=Path, help="file for the losses")
    return tool.run(arguments, _work)


def _work(own: Namespace) -> int:
    check_positive(own, "jobs")
    for flag, number in (
        ("--iterations", own.iterations),
        ("--bf16-iterations", own.bf16_iterations),
    ):
        if number < 3:  # two of warm-up
            raise InputError(f"{flag} is {number}: it must be at least 3")
    systems = own.only or sorted(path.stem for path in SYSTEMS.glob("*.yaml"))
    for name in systems:
        if not (SYSTEMS / f"{name}.yaml").is_file():
            raise InputError(f"--only {name}: there is no {SYSTEMS / name}.yaml")
    check_device("cuda")
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(own.jobs) as pool:
        print("| system | iterations | largest difference | loss in bf16, first to last | |")
        print("|---|---|---|---|---|")
        for row in pool.map(lambda name: _compare(name, Path(folder), own), systems):
            rows.append(row)
            print(_line(row, own.tolerance), flush=True)
            if own.json:
                own.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    agreeing = sum(row.agrees(own.tolerance) for row in rows)
    print(f"{agreeing} of {len(rows)} systems train on the GPU with the losses of the CPU")
    return 0 if agreeing == len(rows) else 1


def _compare(system: str, folder: Path, own: Namespace) -> SystemRow:
    row = SystemRow(system)
    begin, cpu, gpu, bf16 = (
        folder / f"{system}-{name}" for name in ("begin", "cpu", "gpu", "bf16")
    )
    fp32 = ("--train-iters", str(own.iterations))
    short = ("--train-iters", str(own.bf16_iterations))
    try:
        _train(system, begin, *fp32, "--exit-interval", "1", **ON_CPU)
        row.cpu = _train(system, cpu, *fp32, "--load", str(begin), **ON_CPU)
        row.gpu = _train(system, gpu, *fp32, "--load", str(begin))
        row.gpu_bf16 = _train(system, bf16, *short, "--bf16", "true")
    except RunFailed as failed:
        row.error = str(failed)
    return row


def _train(system: str, save: Path, *flags: str, **environment: str) -> list[float]:
    """Runs the training program in one process, and returns the loss of each iteration."""
    command = [
        sys.executable, str(ROOT / "pretrain_gpt_moe.py"),
        "--config", str(SYSTEMS / f"{system}.yaml"), *ON_ONE_DEVICE, *flags, "--save", str(save),
    ]  # fmt: skip
    ended = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, cwd=ROOT
    )
    if ended.returncode:
        reason = last_line(ended.stderr or ended.stdout)
        raise RunFailed(f"{save.name.removeprefix(system + '-')}: {reason}")
    return [line["lm_loss"] for line in read_metrics(save / METRICS_FILE) if "lm_loss" in line]


def _line(row: SystemRow, tolerance: float) -> str:
    ends = f"{row.gpu_bf16[0]:.3f} to {row.gpu_bf16[-1]:.3f}" if row.gpu_bf16 else ""
    verdict = "agrees" if row.agrees(tolerance) else row.error or "DIFFERS"
    return f"| {row.system} | {len(row.cpu)} | {row.difference:.1e} | {ends} | {verdict} |"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
