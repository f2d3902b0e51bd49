"""TensorBoard files read back, W&B with and without the package, and the fan-out."""

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import read_metrics
from moe_parallel.telemetry.sinks import Telemetry, open_telemetry
from moe_parallel.telemetry.tensorboard_sink import TensorBoardSink
from moe_parallel.telemetry.wandb_sink import WandbSink
from tests.telemetry.records import VALIDATION, example_record


def curve(directory, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def log_losses(directory, losses: dict[int, float], **options) -> None:
    sink = TensorBoardSink(directory, **options)
    for iteration, loss in losses.items():
        sink.log(example_record(iteration, lm_loss=loss))
    sink.close()


def test_tensorboard_files_are_readable(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.log(example_record(10, validation=VALIDATION))
    assert curve(tmp_path, "train/lm_loss") == [(10, 4.25)]  # before it is closed
    sink.log(example_record(20))
    sink.close()
    assert curve(tmp_path, "load/layer_02/expert_01") == [(10, 0.25), (20, 0.25)]
    assert curve(tmp_path, "validation/code/loss") == [(10, 3.5)]


def test_tensorboard_of_a_resumed_run_has_each_iteration_once(tmp_path):
    log_losses(tmp_path, {10: 5.0, 20: 4.0, 30: 3.0})
    log_losses(tmp_path, {30: 2.0, 40: 1.0}, resumed_from=20)
    expected = [(10, 5.0), (20, 4.0), (30, 2.0), (40, 1.0)]
    assert curve(tmp_path, "train/lm_loss") == expected


def test_tensorboard_of_a_new_run_hides_another_in_the_same_folder(tmp_path):
    log_losses(tmp_path, {10: 5.0, 20: 4.0})
    log_losses(tmp_path, {10: 3.0})
    assert curve(tmp_path, "train/lm_loss") == [(10, 3.0)]


def wandb_sink(directory, resumed: bool = False) -> WandbSink:
    return WandbSink(directory, "moe", "offline", resumed, {"lr": 1e-3})


def test_wandb_missing_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="--wandb-project moe: .*pip install wandb"):
        wandb_sink(tmp_path)


def test_a_broken_wandb_is_not_called_missing(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text("import a_module_that_wandb_would_need\n")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_wandb_would_need"):
        wandb_sink(tmp_path)


class FakeWandb(types.ModuleType):
    """Notes what the sink asks of wandb."""

    class Error(Exception):
        pass

    class Settings:
        def __init__(self, **options):
            self.options = options

    def __init__(self, failure: str | None = None):
        super().__init__("wandb")
        self.failure, self.started, self.logged, self.axes = failure, [], [], []
        self.finished = False

    def init(self, **options):
        if self.failure:
            raise self.Error(self.failure)
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
    for resumed in (False, True, False):
        sink = wandb_sink(tmp_path, resumed)
        sink.log(example_record(10))
        sink.close()
    first, second, other = (options["id"] for options in wandb.started)
    assert first == second != other
    assert wandb.started[1]["resume"] == "allow"
    assert wandb.started[0]["mode"] == "offline"
    assert ("*", "iteration") in wandb.axes
    assert wandb.logged[0]["iteration"] == 10
    assert wandb.logged[0]["train/lm_loss"] == 4.25
    assert wandb.finished


def test_wandb_that_refuses_to_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("api_key not configured\n(no-tty)"))
    with pytest.raises(InputError, match=r"api_key not configured \(no-tty\).*wandb login"):
        wandb_sink(tmp_path)


def test_wandb_offline_for_real(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    sink = wandb_sink(tmp_path)
    sink.log(example_record(10))
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_a_record_reaches_every_sink(tmp_path, capsys):
    with open_telemetry(tmp_path, 100) as telemetry:
        telemetry.advance(1)
        telemetry.log(example_record(20, validation=VALIDATION))
        telemetry.say("saved iter_0000020")
    assert read_metrics(tmp_path / "metrics.jsonl") == [example_record(20, validation=VALIDATION)]
    assert curve(tmp_path, "train/lm_loss") == [(20, 4.25)]
    assert "loss 4.2500" in (printed := capsys.readouterr().out)
    assert "saved iter_0000020" in printed


def test_without_a_folder_only_the_console(capsys):
    with open_telemetry(None, 100) as telemetry:
        telemetry.log(example_record(20))
    assert "iteration  20/100" in capsys.readouterr().out
    with pytest.raises(InputError, match="--wandb-project p.*--save"):
        open_telemetry(None, 100, wandb_project="p")


def test_a_rank_that_reports_nothing(capsys):
    with Telemetry() as telemetry:
        telemetry.advance(1)
        telemetry.say("hello")
        telemetry.log(example_record())
    assert capsys.readouterr().out == ""


def test_a_sink_that_fails_to_open_closes_the_others(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(TensorBoardSink, "close", lambda self: closed.append("tensorboard"))
    with pytest.raises(InputError, match="pip install wandb"):
        open_telemetry(tmp_path, 100, wandb_project="moe")
    assert closed == ["tensorboard"]


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open():
    class Stuck:
        def __init__(self, failure=None):
            self.failure, self.closed = failure, False

        def log(self, record): ...

        def close(self):
            self.closed = True
            if self.failure:
                raise self.failure

    sinks = Stuck(), Stuck(RuntimeError("disk")), Stuck()
    with pytest.raises(RuntimeError, match="disk"):
        Telemetry(None, *sinks).close()
    assert all(sink.closed for sink in sinks)
