"""What a rank says that it does, and how long it did it."""

import pytest
import torch

from moe_parallel.telemetry.progress import Clock, Phase, Progress, Timers


class Steps(Clock):
    """A clock that advances by 1 at each reading; it counts for what it was waited."""

    def __init__(self):
        self.now = 0
        self.waited = []

    def read(self):
        self.now += 1
        return self.now

    def wait_for(self, reading):
        self.waited.append(reading)


def test_places_in_words():
    progress = Progress()
    assert str(progress.place) == "set-up"
    progress.begin_step(5)
    assert str(progress.place) == "step of iteration 5"
    with progress.during(Phase.FORWARD), progress.during(Phase.DISPATCH):
        assert str(progress.place) == "dispatch of iteration 5"
    progress.end_step()
    assert str(progress.place) == "log after iteration 5"
    with progress.activity(Phase.EVALUATE):
        assert str(progress.place) == "evaluate after iteration 5"
        with progress.during(Phase.FORWARD):
            assert str(progress.place) == "evaluate (forward) after iteration 5"
    assert str(progress.place) == "log after iteration 5"
    with pytest.raises(ZeroDivisionError), progress.activity(Phase.SAVE):
        raise ZeroDivisionError
    assert progress.place.phase is Phase.LOG


def test_the_times_of_a_step():
    """Neither what is outside a step is timed, nor what is only recorded."""
    progress = Progress(Steps())
    with progress.activity(Phase.EVALUATE), progress.during(Phase.FORWARD):
        assert progress.clock.now == 0
    progress.begin_step(1)  # 1
    with progress.untimed(), progress.during(Phase.REPLAY):
        assert progress.place.phase is Phase.REPLAY
    with progress.during(Phase.FORWARD):  # from 2
        with progress.during(Phase.DISPATCH):  # from 3
            pass
        # forward again from 4
    # step from 5
    progress.end_step()  # 6
    ((times,), rows) = progress.take()
    spent = {phase: seconds for phase, seconds in times.items() if seconds}
    assert spent == {Phase.STEP: 2, Phase.FORWARD: 2, Phase.DISPATCH: 1}
    assert sum(times.values()) == 6 - 1
    assert rows == 0
    assert progress.take() == ([], 0)


def test_only_taking_the_times_waits_for_the_device():
    clock = Steps()
    progress = Progress(clock)
    for iteration in (1, 2, 3):
        progress.begin_step(iteration)
        progress.end_step()
    assert clock.waited == []
    assert len(progress.take()[0]) == 3
    assert clock.waited == [6]  # the end of the last step; the others are over before it


def test_a_phase_of_the_backward_pass():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            seen.append(progress.place.phase)
            return 2 * gradient

    progress = Progress()
    x = torch.ones(3, requires_grad=True)
    y = Twice.apply(x)
    progress.during_backward(Phase.DISPATCH, y)
    y.sum().backward()
    assert seen == [Phase.DISPATCH]
    assert progress.place.phase is Phase.SET_UP
    assert x.grad.tolist() == [2, 2, 2]
    progress.during_backward(Phase.DISPATCH, torch.ones(3))  # without gradients: nothing to do


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("forward-compute", Phase.FORWARD),
        ("backward-compute", Phase.BACKWARD),
        ("forward-send-backward-recv", Phase.PIPELINE),
        ("backward-send", Phase.PIPELINE),
        ("all-grads-sync", Phase.REDUCE),
        ("embedding-grads-all-reduce", Phase.REDUCE),
        ("params-all-gather", Phase.REDUCE),
        ("forward-backward", Phase.SET_UP),  # encloses the others: no phase of its own
        ("optimizer-inner-step", Phase.SET_UP),
    ],
)
def test_timers_of_megatron(name, phase):
    progress = Progress()
    timers = Timers(progress)
    timers(name, log_level=2).start(barrier=True)  # without a process group, it would fail
    assert progress.place.phase is phase
    timers(name).stop()
    assert progress.place.phase is Phase.SET_UP
