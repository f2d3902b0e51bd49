"""The clock on a GPU, with a stand-in for torch.cuda."""

from types import SimpleNamespace

import pytest

from tests.tools.cuda_stand_in import LAUNCH, REPLAY, Device
from tools.bench import measurement
from tools.bench.measurement import LONGEST_REPLAYED, TOO_LONG, CudaClock


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    scratch = SimpleNamespace(zero_=lambda: device.launch("clear"))
    stand_in = SimpleNamespace(cuda=device.torch_cuda(), zeros=lambda *shape, device: scratch)
    monkeypatch.setattr(measurement, "torch", stand_in)
    return device


def test_a_replay_is_timed_between_two_events_after_the_cache_is_emptied(device: Device) -> None:
    timer = CudaClock().timer(lambda: (device.launch("a"), device.launch("b")))
    assert timer.without_graph is None
    device.log.clear()
    assert timer() == timer() == pytest.approx(2 * REPLAY / 1e3)
    assert device.log == ["clear", "event", "a again", "b again", "event"] * 2


def test_the_preparation_is_replayed_too_and_not_timed(device: Device) -> None:
    given: list[str] = []

    def prepare() -> tuple[str]:
        device.launch("forward")
        return ("outputs",)

    def work(outputs: str) -> None:
        given.append(outputs)
        device.launch("backward")

    timer = CudaClock().timer(work, prepare)
    assert set(given) == {"outputs"}
    device.log.clear()
    assert timer() == pytest.approx(REPLAY / 1e3)
    assert device.log == ["forward again", "clear", "event", "backward again", "event"]


def test_work_that_waits_is_launched_and_the_reason_kept(device: Device) -> None:
    def work() -> None:
        device.launch("a")
        device.wait()

    timer = CudaClock().timer(work)
    assert timer.without_graph == "RuntimeError: called a synchronizing CUDA operation"
    assert device.debug == 0 and device.capturing is None
    device.log.clear()
    assert timer() == pytest.approx(LAUNCH / 1e3)
    assert device.log == ["clear", "event", "a", "event"]


def test_what_only_a_capture_finds_is_launched_too(device: Device) -> None:
    def work() -> None:
        if device.capturing is not None:
            raise ValueError("not while a graph is captured")
        device.launch("a")

    timer = CudaClock().timer(work, lambda: ())
    assert timer.without_graph == "ValueError: not while a graph is captured"
    assert timer() == pytest.approx(LAUNCH / 1e3)


def test_a_model_is_launched_as_in_training(device: Device) -> None:
    timer = CudaClock(replays=False).timer(device.wait)
    assert timer.without_graph is None
    timer()
    assert device.log == ["clear", "event", "event"]  # nothing ran before the first call


def test_long_work_is_launched(device: Device) -> None:
    kernels = int(1e3 * LONGEST_REPLAYED / LAUNCH) + 1
    timer = CudaClock().timer(lambda: [device.launch("a") for _ in range(kernels)])
    assert timer.without_graph == TOO_LONG
    assert timer() == pytest.approx(kernels * LAUNCH / 1e3)
