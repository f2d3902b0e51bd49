"""How often the host waits for the device in a training step, counted by a stand-in: each method of
a tensor that returns a number to Python waits on a GPU."""

import collections
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed import run_distributed
from tests.tiers import rest_in_full
from tests.training.tiny_run import AOE, Layout, TinyRun

WAITING = (
    "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__",
)  # fmt: skip
NATIVE = {"moe_backend": "native"}
LORY = {"expert_selection": "lory", "lory_segment_length": 4}
MOE_LAYERS = 3

#: The loss of the step, which decides whether it is applied.
LOSS = {"tolist in engine.global_loss": 1}
#: The gradient norm, which decides how far it is clipped; separately for experts that are divided.
NORM, TWO_NORMS = ({"item in clip_grads.get_grad_norm_fp32": number} for number in (1, 2))


def _sizes_of_messages(micro_batches):
    return {"tolist in all_to_all.dispatch": MOE_LAYERS * micro_batches}


STEPS = {
    "topk": (Layout(), {}, LOSS | NORM),
    "top_p": (Layout(), {"expert_selection": "top_p"}, LOSS | NORM),
    "expert_choice": (Layout(), {"expert_selection": "expert_choice"}, LOSS | NORM),
    "aoe": (Layout(), AOE, LOSS | NORM),
    "lory": (Layout(), LORY, LOSS | NORM),
    "topk, ep2": (Layout(2, ep=2), {}, LOSS | TWO_NORMS | _sizes_of_messages(2)),
    "aoe, ep2": (Layout(2, ep=2), AOE, LOSS | TWO_NORMS | _sizes_of_messages(2)),
    "aoe, ep2, recompute": (
        Layout(2, ep=2),
        AOE | {"recompute_granularity": "full"},
        LOSS | TWO_NORMS | _sizes_of_messages(2 * 2),
    ),
}


class Waits:
    """Counts the calls of `WAITING` methods by their callers while the context is open."""

    def __init__(self):
        self.of = collections.Counter()

    def __enter__(self):
        self._patches = ExitStack()
        for name in WAITING:
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._counted(name)))
        return self

    def __exit__(self, *error):
        self._patches.close()

    def _counted(self, name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *arguments, **named):
            code = sys._getframe(1).f_code
            self.of[f"{name} in {Path(code.co_filename).stem}.{code.co_name}"] += 1
            return original(tensor, *arguments, **named)

        return method


def _waits_of_a_step(layout, options, path):
    run = TinyRun(layout, path, options=options | NATIVE)
    run.steps(1)  # the first step makes what the others reuse
    with Waits() as waits:
        run.steps(1)
    return dict(waits.of)


@pytest.mark.parametrize("name", rest_in_full(STEPS, "topk", "aoe, ep2"))
def test_the_host_waits_as_rarely_as_it_can(tmp_path, name):
    layout, options, expected = STEPS[name]
    for waits in run_distributed(layout.world, _waits_of_a_step, layout, options, tmp_path):
        assert waits == expected
