"""Stand-ins for the runs of a study: they write what a run would, in no time."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from moe_parallel.analysis.study.folder import Cell
from moe_parallel.config import Config
from tests.analysis.study_folder import ATTEMPT, layer

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "study" / "compare_selection.py"

STUDY = {
    "num-layers": 2,
    "num-experts": 4,
    "moe-ffn-hidden-size": 32,
    "aoe-low-rank-size": 8,
    "vocab-size": 300,
    "train-iters": 40,
    "seed": 7,
}
TOTALS = {"topk": 1000, "top_p": 1000, "aoe": 1009, "dense": 500, "wide": 1011}


def study_file(folder: Path, **changes: Any) -> Path:
    path = folder / "study.yaml"
    content = {k.replace("_", "-"): v for k, v in {**STUDY, **changes}.items()}
    path.write_text(yaml.safe_dump(content))
    return path


def evaluation(loss: float, speed: float = 100.0) -> list[dict[str, Any]]:
    """The records of a finished run."""
    place = {"iteration": 40, "consumed_tokens": 4000}
    layers = [layer(1, [1, 1], experts_per_token=2.25)]
    return [
        {**place, "lm_loss": loss, "tokens_per_second": speed, "layers": layers},
        {**place, "validation": {"prose": {"loss": loss, "layers": layers}}},
    ]


class FakeRuns:
    """Replaces CellRunner: records what is run, and calls `act` for the result."""

    def __init__(self, act: Callable[[Cell, Any], int]) -> None:
        self.act = act
        self.ran: list[tuple[str, int]] = []
        self.configs: list[Config] = []
        self.jobs = 1

    def __call__(self, processes: int, threads: int, jobs: int) -> "FakeRuns":
        self.jobs = jobs
        return self

    @property
    def names(self) -> list[str]:
        """The runs, and the learning rate of each."""
        pairs = zip(self.ran, self.configs, strict=True)
        return [f"{name} {seed} {config.optimizer.lr:g}" for (name, seed), config in pairs]

    def run(self, cell: Cell, config: Config, stop: Any) -> int:
        self.ran.append((cell.contender, cell.seed))
        self.configs.append(config)
        cell.folder.mkdir(parents=True, exist_ok=True)
        cell.output.write_text("what it printed\n")
        code = self.act(cell, stop)
        cell.add_attempt(ATTEMPT | {"exit_code": code})
        return code


def finish(cell: Cell, stop: Any = None) -> int:
    return write(cell, evaluation(4.0 + cell.seed / 100))


def write(cell: Cell, records: list[dict[str, Any]]) -> int:
    lines = [json.dumps(record) + "\n" for record in records]
    (cell.folder / "metrics.jsonl").write_text("".join(lines))
    return 0


def compare(tool: ModuleType, folder: Path, runs: FakeRuns, *arguments: str, **changes: Any) -> int:
    tool.CellRunner = runs
    line = ["--config", str(study_file(folder, **changes)), "--output", str(folder / "study")]
    return tool.main([*line, *arguments])
