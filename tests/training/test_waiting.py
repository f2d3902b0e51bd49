"""How often the host waits for the device in a training step, counted by a stand-in on a CPU.

On a GPU these wait: the methods of a tensor that return a number to Python, operators whose result
has a size that depends on values, copies to a device that are not queued, and
`torch.cuda.synchronize` and that of an event.
"""

import collections
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_parallel.platform.cpu_host import HostEvent
from moe_parallel.training import step_graph
from moe_parallel.training.loop import Loop
from tests import systems
from tests.distributed import run_distributed
from tests.experts.fp8_stand_in import stand_in_modules
from tests.program import SMALL, pretrain_here, small_data
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full
from tests.training.graph_stand_in import is_sized_by_values, name_of, stand_in
from tests.training.tiny_run import AOE, BATCH, OVERLAP, Layout, TinyRun

RETURNS_A_NUMBER = (
    "item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__",
)  # fmt: skip
#: They read tensors of the host: the state of random numbers, and the norm of a CPU's gradients.
OF_THE_HOST = ("random.fork", "gradients.l2_norm_by_rows")
NATIVE = {"moe_backend": "native"}
MOE_LAYERS = 3

#: The loss of the step, which decides whether it is applied.
LOSS = {"tolist in engine.global_loss": 1}
#: The gradient norm, which decides how far it is clipped; separately for experts and other weights
#: if ranks divide them differently.
NORM, TWO_NORMS = ({"item in clip_grads.get_grad_norm_fp32": number} for number in (1, 2))


def _sizes_of_messages(micro_batches):
    return {"tolist in types.read_sizes": MOE_LAYERS * micro_batches}


def _number_of_rows(micro_batches):
    """Of all experts together, if a token may have fewer choices than slots."""
    return {"routing_map in routing_map.routing_map": MOE_LAYERS * micro_batches}


#: Their gradients through the chosen norms need the number again.
SELECTED_GRADIENT = ("aoe, free experts", "routing_free")
KNOWS_ITS_ROWS = (
    "topk", "topk, one expert", "topk, sigmoid, groups, bias, shared expert",
    "topk, large router, factorized W_g, global loss", "topk, by quantiles", "aoe", "aoe, by bias",
    "aoe, probs over all", "hash", "uoe", "corm", "expert_choice", "aoe_expert_choice",
)  # fmt: skip


def _of_system(name):
    rows = _number_of_rows(BATCH * (2 if name in SELECTED_GRADIENT else 1))
    if name in KNOWS_ITS_ROWS or systems.merges(name):
        rows = {}
    return Layout(), systems.options(name), LOSS | NORM | rows


CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED = CAPACITY | {"moe_pad_expert_input_to_capacity": True}
BUDGET = {"moe_activation_budget": 0.01}
FP8 = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "bf16": True}
STEPS = {name: _of_system(name) for name in SYSTEMS} | {
    "capacity": (Layout(), CAPACITY, LOSS | NORM | _number_of_rows(BATCH)),
    "capacity, padded": (Layout(), PADDED, LOSS | NORM),
    "aoe, within a budget": (Layout(), AOE | BUDGET, LOSS | NORM),
    "fp8": (
        Layout(),
        FP8,
        LOSS | NORM | {"tolist in aligned_rows.aligned_rows": MOE_LAYERS * BATCH},
    ),
    "forced": (Layout(), {"moe_router_force_routing": "hot:1"}, LOSS | NORM),
    "topk, ep2": (Layout(2, ep=2), {}, LOSS | TWO_NORMS | _sizes_of_messages(2)),
    "aoe, ep2": (Layout(2, ep=2), AOE, LOSS | TWO_NORMS | _sizes_of_messages(2)),
    "aoe, ep2, two parts": (
        Layout(2, ep=2),
        AOE | {"moe_dispatch_parts": 2},
        LOSS | TWO_NORMS | _sizes_of_messages(2),
    ),
    "threshold, ep2": (
        Layout(2, ep=2),
        systems.options("threshold"),
        LOSS | TWO_NORMS | _sizes_of_messages(2),
    ),
    "topk, tp2": (Layout(2, tp=2), {}, LOSS | TWO_NORMS),
    "topk, pp2": (Layout(2, pp=2), {}, LOSS | NORM),
    "topk, pp2, virtual": (Layout(2, pp=2, vpp=2), {}, LOSS | NORM),
    "topk, cp2": (Layout(2, cp=2), {}, LOSS | NORM),
    "topk, distributed": (Layout(2, distributed=True), OVERLAP, LOSS | NORM),
    "aoe, ep2, recompute": (
        Layout(2, ep=2),
        AOE | {"recompute_granularity": "full"},
        LOSS | TWO_NORMS | _sizes_of_messages(2 * 2),
    ),
}


class Waits(TorchDispatchMode):
    """Counts what waits by its caller while the context is open."""

    def __init__(self):
        super().__init__()
        self.of = collections.Counter()
        self._patches = ExitStack()

    def __enter__(self):
        for name in RETURNS_A_NUMBER:
            self._patch(torch.Tensor, name, lambda *arguments, **named: True)
        self._patch(torch.Tensor, "to", _is_copy_to_a_device)
        self._patch(torch, "tensor", _is_made_on_a_device)
        for owner in (torch.cuda, HostEvent):
            self._patch(owner, "synchronize", lambda *_, **__: True)
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _patch(self, owner, name, waits):
        original = getattr(owner, name)

        def counted(*arguments, **named):
            if waits(*arguments, **named):
                self._count(name)
            return original(*arguments, **named)

        self._patches.enter_context(mock.patch.object(owner, name, counted))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_sized_by_values(func, args, kwargs):
            self._count(name_of(func))
        return func(*args, **kwargs)

    def _count(self, name):
        frame = sys._getframe(2)
        while Path(frame.f_code.co_filename).is_relative_to(Path(torch.__file__).parent):
            frame = frame.f_back
        caller = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        if caller not in OF_THE_HOST:
            self.of[f"{name} in {caller}"] += 1


def _is_copy_to_a_device(*arguments, non_blocking=False, device=None, **_):
    return not non_blocking and (
        device is not None or any(isinstance(each, torch.device | str) for each in arguments)
    )


def _is_made_on_a_device(*_, device=None, **__):
    """`torch.tensor` copies Python's numbers to the device, and does not queue the copy."""
    return device is not None


def _waits_of_a_step(layout, options, path):
    with mock.patch.dict(sys.modules, stand_in_modules() if "fp8_format" in options else {}):
        run = TinyRun(layout, path, options=options | NATIVE)
        run.steps(1)  # the first step makes what the others reuse
        with Waits() as waits:
            run.steps(1)
        run.close()
    return dict(waits.of)


def _waits_of_an_iteration(options):
    """Those of the third iteration of a run: its step, and what the loop does around it."""
    step, waits = Loop._step, Waits()

    def watched(loop, stream):
        if loop.state.iteration == 3:
            waits.__exit__(None, None, None)
        elif loop.state.iteration == 2:
            waits.__enter__()
        return step(loop, stream)

    with mock.patch.object(Loop, "_step", watched):
        pretrain_here([options])
    # Samples are read from files, into tensors of the host.
    return {wait: number for wait, number in waits.of.items() if "gpt_dataset" not in wait}


LOOP = NATIVE | {"exit_interval": 4, "log_interval": 10}


def test_the_loop_adds_one_wait_to_a_step(tmp_path):
    (found,) = run_distributed(1, _waits_of_an_iteration, SMALL | small_data(tmp_path) | LOOP)
    assert found == LOSS | NORM | {"tolist in loop._agreed": 1}


QUICK = (
    "topk",
    "aoe, ep2",
    "aoe, ep2, two parts",
    "topk, pp2",
    "threshold, ep2",
    "capacity",
    "topk, free experts",
)


@pytest.mark.parametrize("name", rest_in_full(STEPS, *QUICK))
def test_the_host_waits_as_rarely_as_it_can(tmp_path, name):
    layout, options, expected = STEPS[name]
    for waits in run_distributed(layout.world, _waits_of_a_step, layout, options, tmp_path):
        assert waits == expected


GRAPH = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 1}
#: Whether the rows of a step had room.
ROOM = {"tolist in step_graph._end_counting": 1}
VARYING = [name for name in SYSTEMS if "routing_map" in str(STEPS[name][2])]
ON_TWO_RANKS = ("topk, ep2", "aoe, ep2", "threshold, ep2")


def _waits_of_a_recorded_step(layout, options, path):
    with stand_in(), mock.patch.object(step_graph, "MARGIN", 4):  # so that the rows have room
        return _waits_of_a_step(layout, options | GRAPH, path)


@pytest.mark.parametrize(
    "name", rest_in_full([*VARYING, *ON_TWO_RANKS], "top_p", "routing_free", "aoe, ep2")
)
def test_recorded_layers_do_not_wait_for_their_rows(tmp_path, name):
    layout, options, _ = STEPS[name]
    norms = TWO_NORMS if name in ON_TWO_RANKS else NORM
    for waits in run_distributed(
        layout.world, _waits_of_a_recorded_step, layout, options, tmp_path
    ):
        assert waits == LOSS | norms | ROOM
