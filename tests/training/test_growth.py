"""What the host and the network do in a training step as the model grows: operators and messages.

Both are counted as torch dispatches them. On a GPU, an operator is one launch or a few. What our
C++ operators call inside is not counted.
"""

import collections
import re
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests import systems
from tests.distributed import run_distributed
from tests.systems import SYSTEMS
from tests.tiers import rest_in_full
from tests.training.tiny_run import BATCH, LENGTH, Layout, TinyRun

NATIVE = {"moe_backend": "native"}
#: Every step clips, because clipping has operators of its own.
STEP = NATIVE | {"clip_grad": 1e-6}
GROWN = {
    "experts": {"num_experts": 16},
    "tokens": {"seq_length": 4 * LENGTH},
}
CHOICES = {"choices": {"moe_router_topk": 4}}
HAVE_K = ("topk", "aoe", "hash", "uoe")
MOE_LAYERS = 3


class Counts(TorchDispatchMode):
    """Counts operators and messages while it is active."""

    def __init__(self):
        super().__init__()
        self.operators = 0
        self.messages = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("c10d::"):
            self.messages[name.removeprefix("c10d::")] += 1
        else:
            self.operators += 1
        return func(*args, **(kwargs or {}))


def _of_steps(cases, path):
    """On a rank: (operators, messages) of a training step of each case."""
    found = {}
    for name, (layout, options) in cases.items():
        run = TinyRun(layout, path, options=options | STEP)
        run.steps(2)  # they make what later steps reuse
        with Counts() as counts:
            run.steps(1)
        run.close()
        found[name] = counts.operators, dict(counts.messages)
    return found


def _cases(layout, options, grown):
    return {name: (layout, options | more) for name, more in {"as it is": {}, **grown}.items()}


def _of_system(name):
    options = systems.options(name)
    if options["expert_selection"] == "lory":  # so many merges that all are of one round
        options |= {"lory_segment_length": LENGTH // 2}
    return options


@pytest.mark.parametrize("system", rest_in_full(SYSTEMS, "aoe", "topk, free experts"))
def test_operators_do_not_grow_with_experts_choices_or_tokens(tmp_path, system):
    grown = GROWN | (CHOICES if system in HAVE_K else {})
    cases = _cases(Layout(), _of_system(system), grown)
    (found,) = run_distributed(1, _of_steps, cases, tmp_path)
    assert {operators for operators, _ in found.values()} == {found["as it is"][0]}, found


FORCED = {
    "topk, forced": {"moe_router_force_routing": "hot:1"},
    "top_p, forced": {"expert_selection": "top_p", "moe_router_force_routing": "hot:1"},
    "capacity": {"moe_expert_capacity_factor": 1.0},
}


@pytest.mark.parametrize("name", rest_in_full(FORCED, "top_p, forced"))
def test_neither_do_those_of_a_workload_or_a_capacity(tmp_path, name):
    (found,) = run_distributed(1, _of_steps, _cases(Layout(), FORCED[name], GROWN), tmp_path)
    assert {operators for operators, _ in found.values()} == {found["as it is"][0]}, found


DIVIDED = [name for name in SYSTEMS if not systems.merges(name)]


@pytest.mark.parametrize("system", rest_in_full(DIVIDED, "aoe"))
def test_messages_are_five_per_layer_and_micro_batch(tmp_path, system):
    """Rows that each expert gets; tokens with their probs, outputs, and the gradients of both."""
    grown = GROWN | (CHOICES if system in HAVE_K else {})
    cases = _cases(Layout(2, ep=2), _of_system(system), grown)
    for found in run_distributed(2, _of_steps, cases, tmp_path):
        for _, messages in found.values():
            assert messages == found["as it is"][1]
        assert messages["alltoall_base_"] == 5 * MOE_LAYERS * BATCH // 2, messages


@pytest.mark.full
def test_messages_do_not_grow_with_ranks_or_micro_batches(tmp_path):
    """Of four ranks each has one micro-batch of a step, of two ranks two."""
    found = {}
    for ep in (2, 4):
        of_ranks = run_distributed(ep, _of_steps, {ep: (Layout(ep, ep=ep), {})}, tmp_path)
        found[ep] = [each[ep][1]["alltoall_base_"] / (BATCH // ep) for each in of_ranks]
    assert {number for numbers in found.values() for number in numbers} == {5 * MOE_LAYERS}


@pytest.mark.parametrize("parts", rest_in_full([2, 4], 4))
def test_in_parts_all_but_the_numbers_of_rows_travel_part_by_part(tmp_path, parts):
    options = GROWN["experts"] | {"moe_dispatch_parts": parts}
    cases = _cases(Layout(2, ep=2), options, {"tokens": GROWN["tokens"]})
    for found in run_distributed(2, _of_steps, cases, tmp_path):
        assert found["tokens"] == found["as it is"]
        _, messages = found["tokens"]
        assert messages["alltoall_base_"] == (1 + 4 * parts) * MOE_LAYERS * BATCH // 2, messages


PERFORMANCE = Path(__file__).resolve().parents[2] / "docs" / "performance" / "README.md"


def _documented(row, system):
    """The operators of a layer and a micro-batch, from a row of the table of docs/performance."""
    table = re.search(r"^\| \| topk .*?\n\n", PERFORMANCE.read_text(), re.M | re.S)
    of_systems, _, *rows = table[0].splitlines()
    (numbers,) = [line for line in rows if line.startswith(f"| {row} |")]
    cells = dict(zip(of_systems.split("|")[2:], numbers.split("|")[2:], strict=True))
    return int(cells[f" {system} "])


OF_LAYERS = [(1, system) for system in ("topk", "aoe", "top_p", "expert_choice", "lory")]
OF_LAYERS += [(2, system) for system in ("topk", "aoe", "top_p", "expert_choice")]
ROWS = {1: "attention, norms and MoE layer on one rank", 2: "the same with ep 2"}


@pytest.mark.parametrize("of_layer", rest_in_full(OF_LAYERS, (1, "aoe")), ids=str)
def test_a_layer_has_the_documented_number_of_operators(tmp_path, of_layer):
    ep, system = of_layer
    segments = {"lory_segment_length": LENGTH // 2} if system == "lory" else {}
    options = {"expert_selection": system} | segments
    cases = {
        layers: (
            Layout(ep, ep=ep),
            options | {"num_layers": layers, "moe_layer_freq": f"[0]+[1]*{layers - 1}"},
        )
        for layers in (2, 4, 6)
    }
    for found in run_distributed(ep, _of_steps, cases, tmp_path):
        (few, _), (more, _), (many, _) = found.values()
        assert many - more == more - few
        assert round((many - more) / 2 / (BATCH // ep)) == _documented(ROWS[ep], system)
