"""Each file of examples/systems trains its own system with its own options, at small sizes."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.config import parse_command_line
from moe_parallel.telemetry.metrics import read_metrics
from tests.distributed import run_distributed
from tests.program import SMALL, flags, pretrain_here, small_data
from tests.tiers import rest_in_full

SYSTEMS = sorted((Path(__file__).parents[2] / "examples" / "systems").glob("*.yaml"))
#: In the quick tier; tests/config/test_examples.py reads every file there.
QUICK = SYSTEMS[::8]

#: The sizes come from tests.program.SMALL; the options of the system come from the file.
SIZES = {name: value for name, value in SMALL.items() if name != "num_experts"} | {
    "train_iters": 2,
    "global_batch_size": 4,
    "lr_warmup_iters": 1,
}

RunFolder = Callable[[Path], Path]


def overrides(path: Path) -> dict[str, Any]:
    text = path.read_text()
    smaller: dict[str, Any] = {}
    if "lory-segment-length" in text:
        smaller["lory_segment_length"] = 8
    if "aoe-low-rank-size" in text:
        smaller["aoe_low_rank_size"] = 8
    if "uoe-routing-neurons" in text:
        smaller["uoe_routing_neurons"] = 8
    return SIZES | smaller


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of a file's run. The files of a tier train in one world of processes."""
    folder = tmp_path_factory.mktemp("runs")
    data = small_data(folder)

    @functools.cache
    def train(paths: tuple[Path, ...]) -> None:
        runs = [{"config": path, **overrides(path), "save": folder / path.stem, **data}
                for path in paths]  # fmt: skip
        for ends in run_distributed(2, pretrain_here, runs, timeout=300):
            assert [code for code, _ in ends] == [0] * len(paths)

    def of_file(path: Path) -> Path:
        train(tuple(file for file in SYSTEMS if (file in QUICK) == (path in QUICK)))
        return folder / path.stem

    return of_file


@pytest.mark.parametrize("path", rest_in_full(SYSTEMS, *QUICK), ids=lambda path: path.stem)
def test_trains_two_steps(path: Path, run_folder: RunFolder) -> None:
    save = run_folder(path)
    records = read_metrics(save / "metrics.jsonl")
    losses = [record["lm_loss"] for record in records if "lm_loss" in record]
    assert len(losses) == 2
    assert all(5 < loss < 6.5 for loss in losses)  # near ln 300, the tokenizer's vocabulary
    trained = parse_command_line(["--config", str(save / "config.yaml")])
    given = {"config": path, **overrides(path)}
    assert trained.selection == parse_command_line(flags(given)).selection
    controlled = trained.selection.controlled
    if controlled is not None:
        assert all(record[controlled] > 0 for record in records if "lm_loss" in record)
        assert all(record["experts_per_token"] > 0 for record in records if "lm_loss" in record)
