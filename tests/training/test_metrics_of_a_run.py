"""The files of a run in --save, and its output."""

import json

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_parallel.data.tokenizer import load_tokenizer
from tests.distributed import run_distributed
from tests.program import (
    AOE,
    SMALL,
    pretrain_and_draw,
    pretrain_here,
    same_bytes,
    small_data,
    stored_tensors,
)

TOKENS = SMALL["global_batch_size"] * SMALL["seq_length"]
RUN = {
    "train_iters": 10,
    "save_interval": 10,
    "eval_interval": 4,
    "full_evaluation": True,
    "tensorboard": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(data flags, folder of a finished run, output of rank 0 and of rank 1)."""
    folder = tmp_path_factory.mktemp("metrics")
    data = small_data(folder)
    options = SMALL | AOE | data | RUN | {"save": folder / "run"}
    ends = run_distributed(2, pretrain_and_draw, [options])
    assert [code for ((code, _),) in ends] == [0, 0]
    return data, folder / "run", [printed for ((_, printed),) in ends]


@pytest.fixture(scope="module")
def records(run):
    return [json.loads(line) for line in (run[1] / "metrics.jsonl").read_text().splitlines()]


def test_the_files_of_a_run(run):
    data, save, _ = run
    assert {path.name for path in save.iterdir()} == {
        "config.yaml",
        "iter_0000010",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
        "run.png",
        "starts.jsonl",
        "tensorboard",
        "tokenizer",
    }
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "10"
    assert (save / "run.png").read_bytes().startswith(b"\x89PNG\r\n")
    written = load_tokenizer(data["tokenizer_model"]).fingerprint
    for tokenizer in (save / "tokenizer", save / "iter_0000010" / "tokenizer"):
        assert load_tokenizer(tokenizer).fingerprint == written
    config = (save / "config.yaml").read_text()
    assert (save / "iter_0000010" / "config.yaml").read_text() == config


def test_every_iteration_is_measured(records):
    logged = [record for record in records if "lm_loss" in record]
    assert [record["iteration"] for record in logged] == list(range(1, 11))
    for number, record in enumerate(logged, start=1):
        assert record["consumed_tokens"] == number * TOKENS
        assert record["consumed_samples"] == number * SMALL["global_batch_size"]
        assert record["tokens_per_second"] > 0 and record["grad_norm"] > 0
        assert record["peak_memory_bytes"] > 50 * 2**20  # torch alone uses more
    assert 4 < logged[0]["lm_loss"] < 8  # ln 300 = 5.7 before training
    assert logged[-1]["lm_loss"] < logged[0]["lm_loss"]
    assert max(r["learning_rate"] for r in logged) == SMALL["lr"]


def test_evaluations(records):
    evaluated = {r["iteration"]: r["validation"] for r in records if "validation" in r}
    assert list(evaluated) == [4, 8, 10]
    for validation in evaluated.values():
        assert list(validation) == ["cycle", "noise"]
        for measures in validation.values():
            assert measures.keys() == {"loss", "bits_per_byte", "layers"}
            assert [layer["layer"] for layer in measures["layers"]] == [1, 2]
            assert 0 < measures["loss"] < 8 and 0 < measures["bits_per_byte"] < 12


def test_what_is_printed(run):
    _, save, (on_0, on_1) = run
    assert on_1 == ""
    lines = on_0.splitlines()
    assert "on 2 ranks (tp 1 pp 1 dp 2 ep 1 etp 1); 10 iterations of 256 tokens" in lines[0]
    assert [line.split("|")[0].strip() for line in lines if "loss" in line] == [
        f"iteration {number:>2}/10" for number in range(1, 11)
    ]
    assert f"saved {save}/iter_0000010" in lines
    assert lines[-1] == f"figure: {save}/run.png"
    (head,) = (number for number, line in enumerate(lines) if "xz" in line)
    assert lines[head].split() == "bits per byte model xz -9".split()
    assert [line.split()[0] for line in lines[head + 1 : head + 4]] == ["cycle", "noise", "all"]


def test_tensorboard(run, records):
    events = EventAccumulator(str(run[1] / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/lm_loss")}
    logged = {r["iteration"]: r["lm_loss"] for r in records if "lm_loss" in r}
    assert losses == pytest.approx(logged, rel=1e-6)
    assert len(events.Scalars("validation/noise/bits_per_byte")) == 3


@pytest.mark.full
def test_config_yaml_alone_runs_it_again(run, records, tmp_path):
    """The first half, run alone: the order of the data is that of the complete run."""
    _, save, _ = run
    assert yaml.safe_load((save / "config.yaml").read_text())["train-iters"] == 10
    again = {"config": save / "config.yaml", "save": tmp_path}
    run_distributed(2, pretrain_here, [again | {"eval_interval": "none"}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    names = ("iteration", "lm_loss", "grad_norm", "learning_rate", "layers")
    measured = [
        [[r[name] for name in names] for r in of_run if "lm_loss" in r]
        for of_run in (records, map(json.loads, lines))
    ]
    assert measured[0] == measured[1]
    assert same_bytes(
        stored_tensors(tmp_path / "iter_0000010"), stored_tensors(save / "iter_0000010")
    )


LAYOUTS = {
    "ep": {"expert_model_parallel_size": 2},
    "tp": {"tensor_model_parallel_size": 2},
    "tp with whole experts": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "etp": {"expert_tensor_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.full
def test_tokens_and_choices_are_counted_once_in_every_layout(tmp_path):
    common = SMALL | small_data(tmp_path) | {"exit_interval": 2, "log_interval": 2}
    runs = [common | layout | {"save": tmp_path / name} for name, layout in LAYOUTS.items()]
    run_distributed(2, pretrain_here, runs)
    for name in LAYOUTS:
        (record,) = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert record["consumed_tokens"] == 2 * TOKENS, name
        choices = [sum(layer["tokens_per_expert"]) for layer in record["layers"]]
        assert choices == [2 * 2 * TOKENS] * 2, name
