"""Three gates: run to run, after a resume, and at another time on another host.

Weights and optimizer state are the same to the bit in every checkpoint, and every number in
metrics.jsonl that does not measure the machine is the same to its last digit.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.config import Config
from moe_parallel.platform.determinism import be_deterministic
from moe_parallel.telemetry.metrics import TIMING
from moe_parallel.training.pretrain import main
from moe_parallel.training.signals import EXIT_BAD_INPUT
from tests.distributed import run_distributed
from tests.program import (
    AOE,
    SMALL,
    Program,
    Ranks,
    flags,
    pretrain_here,
    same_bytes,
    small_data,
    stored_tensors,
)

ELSEWHERE = Path(__file__).parents[1] / "elsewhere"
LOGGED = SMALL | {
    "train_iters": 6,
    "save_interval": 2,
    "eval_interval": 2,
    "expert_model_parallel_size": 2,
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "AoE in bf16, distributed optimizer": AOE | {"bf16": True, "use_distributed_optimizer": True},
    "top-k with losses": {"moe_z_loss_coeff": 1e-3, "micro_batch_size": 1},
    "merged experts": {"expert_selection": "smear", "smear_sees_the_future": True}
    | {"expert_model_parallel_size": 1},
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    | {"expert_model_parallel_size": 1},
    "pipeline": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1},
}


def records(save: Path) -> list[dict[str, Any]]:
    """Every record, without the measurements of the machine."""
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def assert_same(save: Path, other: Path) -> None:
    assert records(save) == records(other)
    for name in ("iter_0000004", "iter_0000006"):
        assert same_bytes(stored_tensors(save / name), stored_tensors(other / name)), name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_data(tmp_path_factory.mktemp("data"))


#: The settings of --deterministic-mode, in the processes of ranks that do not run `main`.
DETERMINISTIC = partial(be_deterministic, Config())


@pytest.fixture(scope="module", params=SYSTEMS)
def first(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]
) -> tuple[dict[str, Any], Path]:
    """(options, the folder of a run of two ranks)."""
    options = LOGGED | {"deterministic_mode": True} | SYSTEMS[request.param] | data
    save = tmp_path_factory.mktemp("first")
    run_distributed(2, pretrain_here, [options | {"save": save}], DETERMINISTIC)
    return options, save


@pytest.mark.full
def test_run_to_run(first: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    options, save = first
    run_distributed(2, pretrain_here, [options | {"save": tmp_path}], DETERMINISTIC)
    assert_same(tmp_path, save)


def _main_after_a_choice_of_algorithm(arguments: list[str]) -> None:
    os.environ["NCCL_ALGO"] = "NVLS"
    main(arguments)


def test_the_program_refuses_before_it_communicates(tmp_path: Path, data: dict[str, Any]) -> None:
    arguments = flags(LOGGED | data | {"deterministic_mode": True, "save": tmp_path / "run"})
    with Ranks(tmp_path, 2, _main_after_a_choice_of_algorithm, arguments) as ranks:
        assert ranks.finish() == [EXIT_BAD_INPUT] * 2
        output = ranks.output
    assert output.startswith("error: --deterministic-mode: the environment variable NCCL_ALGO is ")
    assert output.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_another_time_on_another_host(tmp_path: Path, data: dict[str, Any]) -> None:
    """Other processes and hash seeds, another environment and folder, data in another place, and
    memory that malloc fills with other bytes."""
    options = LOGGED | {"deterministic_mode": True} | AOE
    moved = Path(shutil.copytree(data["tokenizer_model"].parent, tmp_path / "moved data"))
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder, its_data, variables in (
        (here, data, {"PYTHONHASHSEED": "1"}),
        (
            elsewhere,
            {
                name: [moved / p.name for p in path] if name == "data_path" else path
                for name, path in data.items()
            }
            | {"data_cache_path": tmp_path / "another cache", "tensorboard": True},
            {
                "PYTHONHASHSEED": "2",
                "PYTHONPATH": os.pathsep.join([str(ELSEWHERE), str(Path.cwd())]),
                "TZ": "Pacific/Auckland",
                "LANG": "tr_TR.UTF-8",
                "HOME": str(tmp_path),
                "TMPDIR": str(tmp_path),
                "MALLOC_PERTURB_": "165",
            },
        ),
    ):
        folder.mkdir()
        command = flags(options | its_data | {"save": folder / "run"})
        with Program(folder, 2, command, variables) as job:
            assert job.finish(600) == 0, job.output
    assert_same(elsewhere / "run", here / "run")
    (events,) = (elsewhere / "run" / "tensorboard").iterdir()
    assert "another-host" in events.name  # so the stand-in was in force
