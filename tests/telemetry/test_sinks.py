"""TensorBoard files read back, W&B with and without the package, and a record to all sinks."""

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_parallel.errors import InputError
from moe_parallel.telemetry.sinks import (
    Telemetry,
    TensorBoardSink,
    WandbSink,
    histograms,
    open_telemetry,
    scalars,
)
from tests.telemetry.records import VALIDATION, example_record


def events(directory) -> EventAccumulator:
    everything = {"scalars": 0, "histograms": 0}
    found = EventAccumulator(str(directory / "tensorboard"), size_guidance=everything)
    return found.Reload()


def curve(directory, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(directory).Scalars(name)]


def log_losses(directory, losses: dict[int, float], **options) -> None:
    sink = TensorBoardSink(directory, **options)
    for iteration, loss in losses.items():
        sink.log(example_record(iteration, lm_loss=loss))
    sink.close()


def test_tensorboard_files_are_readable(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.log(example_record(10, validation=VALIDATION))
    assert curve(tmp_path, "train/lm_loss") == [(10, 4.25)]  # before the file is closed
    sink.log(example_record(20))
    sink.close()
    assert curve(tmp_path, "moe/layer_02/imbalance") == [(10, 1.5), (20, 1.5)]
    assert curve(tmp_path, "validation/code/loss") == [(10, 3.5)]
    (load, _) = events(tmp_path).Histograms("moe/layer_02/load")
    assert (load.step, load.histogram_value.num) == (10, 2)
    assert (load.histogram_value.min, load.histogram_value.max) == (0.5, 1.5)
    assert not [tag for tag in events(tmp_path).Tags()["scalars"] if "expert_0" in tag]


def test_tensorboard_of_a_resumed_run_has_each_iteration_once(tmp_path):
    log_losses(tmp_path, {10: 5.0, 20: 4.0, 30: 3.0})
    last = [example_record(20, lm_loss=4.0)]
    log_losses(tmp_path, {30: 2.0, 40: 1.0}, resumed_from=20, last=last)
    expected = [(10, 5.0), (20, 4.0), (30, 2.0), (40, 1.0)]
    assert curve(tmp_path, "train/lm_loss") == expected
    log_losses(tmp_path, {10: 3.0})  # a new run hides another in the same folder
    assert curve(tmp_path, "train/lm_loss") == [(10, 3.0)]


def wandb_sink(directory, told=None) -> WandbSink:
    return WandbSink(directory, "moe", "offline", told, {"lr": 1e-3})


def test_wandb_missing_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="--wandb-project moe needs wandb, .*pip install wandb"):
        wandb_sink(tmp_path)


class FakeWandb(types.ModuleType):
    """Records the calls of the sink."""

    class Error(Exception):
        pass

    class Settings:
        def __init__(self, **options):
            self.options = options

    def __init__(self):
        super().__init__("wandb")
        self.started, self.logged, self.axes = [], [], []
        self.finished = False

    Histogram = staticmethod(list)

    def init(self, **options):
        self.started.append(options)
        return self

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for told in (None, [], None):
        sink = wandb_sink(tmp_path, told)
        sink.log(example_record(10))
        sink.close()
    first, second, other = (options["id"] for options in wandb.started)
    assert first == second != other
    assert wandb.started[1]["resume"] == "allow"
    assert wandb.started[0]["mode"] == "offline"
    assert ("*", "iteration") in wandb.axes
    assert wandb.logged[0]["iteration"] == 10
    assert wandb.logged[0]["train/lm_loss"] == 4.25
    assert wandb.logged[0]["moe/layer_01/load"] == [1.5, 0.5]
    assert wandb.finished


def test_wandb_is_not_told_again(tmp_path, monkeypatch):
    """W&B cannot remove records after the checkpoint; a value that differs is logged again."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    nan = float("nan")
    made = [example_record(20), example_record(30, grad_norm=nan), example_record(40)]
    with open_telemetry(tmp_path, 100, tensorboard=False, wandb_project="moe") as telemetry:
        for record in made:
            telemetry.log(record)
    again = {"first": 20, "resumed_from": 20}
    with open_telemetry(
        tmp_path, 100, tensorboard=False, wandb_project="moe", **again
    ) as telemetry:
        telemetry.log(made[1] | {"elapsed_seconds": 99.0, "tokens_per_second": 1.0})
        telemetry.log(made[2] | {"lm_loss": 5.0})
        telemetry.log(example_record(50))
    logged = [(values["iteration"], values["train/lm_loss"]) for values in wandb.logged]
    assert logged == [(20, 4.25), (30, 4.25), (40, 4.25), (40, 5.0), (50, 4.25)]


def test_without_a_folder_only_the_console_and_on_other_ranks_nothing(capsys):
    with open_telemetry(None, 100) as telemetry:
        telemetry.log(example_record(20))
    assert "iteration  20/100" in capsys.readouterr().out
    with pytest.raises(InputError, match="--wandb-project p.*--save"):
        open_telemetry(None, 100, wandb_project="p")
    with Telemetry() as telemetry:
        telemetry.advance(1)
        telemetry.say("hello")
        telemetry.log(example_record())
    assert capsys.readouterr().out == ""


def test_names_and_values():
    """6 of 8 choices fall on an expert of layer 1, where an even load would be 4."""
    record = example_record(validation=VALIDATION, machine={"mfu": 0.5, "gpu_watts": None})
    record["layers"][0] |= {"z_loss": 4.0, "experts_per_token": 1.5}
    record["layers"][1] |= {"utilisation": 0.5, "routing_weight_per_expert": [0.25, 0.75]}
    record["layers"][1]["tokens_per_expert"] = [4, 4]
    named = scalars(record)
    expected = {
        "train/lm_loss": 4.25,
        "train/consumed_tokens": 81920,
        "machine/mfu": 0.5,
        "validation/prose/bits_per_byte": 2.25,
        "moe/layer_02/ent_load": 0.5,
        "moe/layer_01/tokens_dropped": 1,
        "moe/layer_01/imbalance": 1.5,
        "moe/layer_01/z_loss": 4.0,
        "moe/layer_01/experts_per_token": 1.5,
        "moe/layer_02/utilisation": 0.5,
        "moe/ent_load": 0.5,
        "moe/ent_conf": 0.25,
        "moe/max_minus_min_load": 1.0,
        "moe/tokens_dropped": 2,
        "moe/imbalance_mean": 1.25,
        "moe/imbalance_max": 1.5,
    }
    assert {name: named[name] for name in expected} == expected
    absent = {"train/iteration", "train/machine", "machine/gpu_watts", "moe/layer_02/z_loss"}
    assert not absent & named.keys()
    by_expert = histograms(record)
    assert by_expert["moe/layer_02/routing_weight"] == [0.25, 0.75]
    assert "moe/layer_01/routing_weight" not in by_expert


def test_what_is_not_finite_is_left_out():
    record = example_record()
    record["layers"][0]["norm_per_expert"] = [float("nan"), 2.0]
    record["layers"][1]["norm_per_expert"] = [None, None]
    by_expert = histograms(record)
    assert by_expert["moe/layer_01/norm"] == [2.0]
    assert "moe/layer_02/norm" not in by_expert
    named = scalars({"iteration": 3, "lm_loss": float("nan"), "grad_norm": None, "aux_loss": 1})
    assert named == {"train/aux_loss": 1.0}
