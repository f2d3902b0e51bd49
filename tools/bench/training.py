"""Train AoE, top-p and their MoE twin of as many parameters, in turns; compare speed and memory.

    python tools/bench/training.py --sizes goals --json training.json    # the 732M of the paper
    python tools/bench/training.py                                       # a look, on a CPU too
    python tools/bench/training.py --sizes goals --gradient-accumulation-fusion true

One process on one device trains on random tokens. All contenders run one after the other, then all
again. The first iterations of a run are not counted, and the run is ended before it saves. Flags of
the training program are passed to every contender. Exit codes: 0 done, whatever was measured; 2 a
wrong flag, or a run that ended by itself, with its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.platform.megatron import suppress_warnings

suppress_warnings()  # before Megatron-Core is imported

from moe_parallel.data.indexed import write_indexed  # noqa: E402
from moe_parallel.errors import InputError  # noqa: E402
from moe_parallel.reading import read_end  # noqa: E402
from moe_parallel.telemetry.metrics import METRICS_FILE, MetricsLine, read_metrics  # noqa: E402
from moe_parallel.tool import Tool, check_positive, last_line  # noqa: E402
from tools.bench.benchmark import ROOT, about  # noqa: E402
from tools.bench.sizes import GOALS, SMALL  # noqa: E402

PAPERS = ROOT / "examples" / "papers" / "aoe"
VOCABULARY = 32000  # the paper's
TOKENS = 2_000_000
WIDTH = 4392  # of AoE's experts; Eq. 5 gives 4393, which tensor cores cannot read
POLL_SECONDS = 0.2
LEFT_OUT = 2  # iterations at the beginning of a run
BY_BIAS = {"moe-aux-loss-coeff": "0", "moe-router-enable-expert-bias": "true"}

ONE_DEVICE = {
    "expert-model-parallel-size": "1",
    # In one micro-batch, because a GPU waits for the host in small ones.
    "global-batch-size": "16",
    "micro-batch-size": "16",
    "train-iters": "100000",
    "lr-warmup-iters": "10",
    "log-interval": "1",
    "eval-interval": "100000",
    "tokenizer-type": "NullTokenizer",
    "vocab-size": str(VOCABULARY),
}
SMALL_MODEL = {
    "num-layers": "2",
    "hidden-size": "64",
    "num-attention-heads": "4",
    "ffn-hidden-size": "256",
    "seq-length": "64",
}


@dataclass(frozen=True)
class TwinContender:
    """A configuration of the paper with its own flags, and the one that it is compared with."""

    name: str
    file: str
    flags: dict[str, str] = field(default_factory=dict)
    twin: str | None = None


def contenders(rank: int, width: int | None = None) -> list[TwinContender]:
    """The contenders. `rank`: d_low of AoE; `width`: d_wide; None: as it follows by Eq. 5."""
    low_rank = {"aoe-low-rank-size": str(rank)}
    if width is not None:
        low_rank["aoe-wide-size"] = str(width)
    moe, moe_by_bias = "MoE, aux loss", "MoE, by bias"
    return [
        TwinContender(moe, "moe_732m.yaml"),
        TwinContender("AoE, aux loss, full gradient", "aoe_732m.yaml", low_rank, moe),
        TwinContender(moe_by_bias, "moe_732m.yaml", BY_BIAS),
        TwinContender(
            "AoE, by bias, selected gradient", "aoe_732m.yaml",
            low_rank | BY_BIAS | {"aoe-gradient": "selected"}, moe_by_bias,
        ),
        TwinContender(
            "top-p, 2 experts on average", "moe_732m.yaml",
            {"expert-selection": "top_p", "moe-top-p-target-experts": "2"}, moe,
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class TwinRun:
    """The measurements of a run: tokens per second of each counted iteration, and peak memory."""

    tokens_per_second: list[float]
    peak_memory_bytes: int

    @classmethod
    def of(cls, records: list[MetricsLine]) -> TwinRun:
        counted = records[LEFT_OUT:]
        return cls(
            [record["tokens_per_second"] for record in counted],
            max(record["peak_memory_bytes"] for record in counted),
        )


def main(options: argparse.Namespace, flags: list[str]) -> int:
    check_positive(options, "iterations", "turns")
    facts = about("training.py", sys.argv[1:])
    print(f"{facts['command']}   ({facts['date']})\nmachine   {facts['machine']}", flush=True)
    is_small = options.sizes == SMALL
    field_of = contenders(16) if is_small else contenders(64, WIDTH)
    runs: dict[str, list[TwinRun]] = {contender.name: [] for contender in field_of}
    with tempfile.TemporaryDirectory() as folder:
        data = random_data(Path(folder))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        common = (
            ONE_DEVICE | data | (SMALL_MODEL if is_small else {}) | {"distributed-backend": backend}
        )
        for turn in range(options.turns):
            for contender in field_of:
                run_folder = Path(folder) / f"{turn}-{contender.name}"
                command = command_of(contender, common, run_folder, flags)
                records = train(command, run_folder, options.iterations + LEFT_OUT)
                runs[contender.name].append(TwinRun.of(records))
    print("\n".join(table(field_of, runs)))
    if options.json is not None:
        samples = {name: [vars(run) for run in of_name] for name, of_name in runs.items()}
        options.json.write_text(json.dumps({"about": facts, "runs": samples}, indent=1))
    return 0


def random_data(folder: Path) -> dict[str, str]:
    generator = np.random.default_rng(0)
    documents = (generator.integers(0, VOCABULARY, 1000).tolist() for _ in range(TOKENS // 1000))
    write_indexed(folder / "random", documents, VOCABULARY)
    return {"data-path": str(folder / "random"), "data-cache-path": str(folder / "cache")}


def command_of(
    contender: TwinContender, common: dict[str, str], folder: Path, flags: Iterable[str]
) -> list[str]:
    command = [sys.executable, str(ROOT / "pretrain_gpt_moe.py")]
    command += ["--config", str(PAPERS / contender.file), "--save", str(folder)]
    for name, value in (common | contender.flags).items():
        command += [f"--{name}", value]
    return [*command, *flags]


def train(command: list[str], folder: Path, iterations: int) -> list[MetricsLine]:
    """The records of `iterations` iterations. Then the run is ended, before it saves."""
    output = folder.with_suffix(".log")
    before = filter(None, [os.environ.get("PYTHONPATH")])
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *before])},
        )  # fmt: skip
    try:
        while process.poll() is None:
            records = training_records(folder)
            if len(records) >= iterations:
                return records[:iterations]
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    raise InputError(f"a run ended by itself: {last_line(read_end(output))}")


def training_records(folder: Path) -> list[MetricsLine]:
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    return [record for record in read_metrics(path) if "tokens_per_second" in record]


def table(field_of: list[TwinContender], runs: dict[str, list[TwinRun]]) -> list[str]:
    """The table. Each ratio is the median over turns of the ratio of two runs in a turn."""
    head = f"  {'':<34}{'tokens/s':>10}  {'speed':>8}  {'peak MiB':>10}  {'memory':>8}"
    lines = ["", head]
    for contender in field_of:
        ours = runs[contender.name]
        speed = statistics.median(v for run in ours for v in run.tokens_per_second)
        peak = max(run.peak_memory_bytes for run in ours)
        line = f"  {contender.name:<34}{speed:>10,.0f}"
        if contender.twin is None:
            lines.append(f"{line}  {'':>8}  {peak / 2**20:>10,.1f}")
            continue
        faster, larger = ratios(ours, runs[contender.twin])
        lines.append(f"{line}  {faster:>7.3f}x  {peak / 2**20:>10,.1f}  {larger:>7.3f}x")
    return lines


def ratios(ours: list[TwinRun], twins: list[TwinRun]) -> tuple[float, float]:
    """The speed and the memory of our runs, as multiples of the twin's."""
    speeds = [
        statistics.median(run.tokens_per_second) / statistics.median(twin.tokens_per_second)
        for run, twin in zip(ours, twins, strict=True)
    ]
    memories = [
        run.peak_memory_bytes / twin.peak_memory_bytes
        for run, twin in zip(ours, twins, strict=True)
    ]
    return statistics.median(speeds), statistics.median(memories)


if __name__ == "__main__":
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--sizes", choices=[SMALL, GOALS], default=SMALL,
        help="small: a tiny model; goals: 732M parameters, d_low 64 (default: small)")  # fmt: skip
    add(
        "--iterations",
        type=int,
        default=8,
        metavar="N",
        help="number of measured iterations per run (default: 8)",
    )
    add("--turns", type=int, default=2, metavar="N", help="runs of each contender (default: 2)")
    add("--json", type=Path, metavar="FILE", help="write the samples too")
    sys.exit(tool.run_with_training_flags(sys.argv[1:], main))
