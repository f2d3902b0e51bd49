"""What the host and the network do in a training step as the model grows: operators and messages.

Both are counted as torch dispatches them. On a GPU, an operator is one launch or a few. What our
C++ operators call inside is not counted.
"""

import collections
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_parallel.config import FixedNumber
from moe_parallel.ops.causal_attention import serves
from moe_parallel.systems import SELECTIONS
from tests import systems
from tests.distributed import run_distributed
from tests.systems import SYSTEMS
from tests.training.tiny_run import BATCH, LENGTH, Layout, TinyRun

pytestmark = pytest.mark.full

NATIVE = {"moe_backend": "native"}
#: Every step clips, because clipping has operators of its own.
STEP = NATIVE | {"clip_grad": 1e-6}
GROWN = {
    "experts": {"num_experts": 16},
    "tokens": {"seq_length": 4 * LENGTH},
}
CHOICES = {"choices": {"moe_router_topk": 4}}
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


def _grown(system):
    has_k = "," not in system and issubclass(SELECTIONS[system], FixedNumber)
    return GROWN | (CHOICES if has_k else {})


def _of_system(name):
    options = systems.options(name)
    if options["expert_selection"] == "lory":  # so many merges that all are of one round
        options |= {"lory_segment_length": LENGTH // 2}
    return options


FORCED = {
    "topk, forced": {"moe_router_force_routing": "hot:1"},
    "top_p, forced": {"expert_selection": "top_p", "moe_router_force_routing": "hot:1"},
    "capacity": {"moe_expert_capacity_factor": 1.0},
}


@pytest.mark.parametrize("name", [*SYSTEMS, *FORCED])
def test_operators_do_not_grow_with_experts_choices_or_tokens(tmp_path, name):
    options, grown = (FORCED[name], GROWN) if name in FORCED else (_of_system(name), _grown(name))
    (found,) = run_distributed(1, _of_steps, _cases(Layout(), options, grown), tmp_path)
    assert {operators for operators, _ in found.values()} == {found["as it is"][0]}, found


DIVIDED = [name for name in SYSTEMS if not systems.merges(name)]


@pytest.mark.parametrize("system", DIVIDED)
def test_messages_are_five_per_layer_and_micro_batch(tmp_path, system):
    """Rows that each expert gets; tokens with their probs, outputs, and the gradients of both."""
    cases = _cases(Layout(2, ep=2), _of_system(system), _grown(system))
    for found in run_distributed(2, _of_steps, cases, tmp_path):
        for _, messages in found.values():
            assert messages == found["as it is"][1]
        assert messages["alltoall_base_"] == 5 * MOE_LAYERS * BATCH // 2, messages


def test_messages_do_not_grow_with_ranks_or_micro_batches(tmp_path):
    """Of four ranks each has one micro-batch of a step, of two ranks two."""
    found = {}
    for ep in (2, 4):
        of_ranks = run_distributed(ep, _of_steps, {ep: (Layout(ep, ep=ep), {})}, tmp_path)
        found[ep] = [each[ep][1]["alltoall_base_"] / (BATCH // ep) for each in of_ranks]
    assert {number for numbers in found.values() for number in numbers} == {5 * MOE_LAYERS}


@pytest.mark.parametrize("parts", [2, 4])
def test_in_parts_all_but_the_numbers_of_rows_travel_part_by_part(tmp_path, parts):
    options = GROWN["experts"] | {"moe_dispatch_parts": parts}
    cases = _cases(Layout(2, ep=2), options, {"tokens": GROWN["tokens"]})
    for found in run_distributed(2, _of_steps, cases, tmp_path):
        assert found["tokens"] == found["as it is"]
        _, messages = found["tokens"]
        assert messages["alltoall_base_"] == (1 + 4 * parts) * MOE_LAYERS * BATCH // 2, messages


PERFORMANCE = Path(__file__).resolve().parents[2] / "docs" / "performance" / "README.md"


def _documented(system):
    """From the table of docs/performance: the operators of a layer and a micro-batch, on one rank
    and with ep 2; and how many fewer a dense layer has."""
    table = re.search(r"^\| \| topk .*?\n\n", PERFORMANCE.read_text(), re.M | re.S)
    of_systems, _, *rows = (line.split("|")[2:-1] for line in table[0].strip().splitlines())
    numbers = [row[of_systems.index(f" {system} ")].strip() for row in rows]
    return [int(number) for number in numbers if number]


def _operators_of_a_layer(layout, options, path):
    """Of one layer and one micro-batch, on each rank; the same for the third as for the fourth."""
    cases = {
        layers: (layout, options | {"num_layers": layers, "moe_layer_freq": freq})
        for layers, freq in zip((2, 4, 6), options["moe_layer_freq"], strict=True)
    }
    added = set()
    for found in run_distributed(layout.world, _of_steps, cases, path):
        counts = [operators for operators, _ in found.values()]
        added |= {many - few for few, many in pairwise(counts)}
    assert len(added) == 1, added
    (of_two,) = added
    return round(of_two / 2 / (BATCH // layout.world))


EXPERTS = ["[0]+[1]", "[0]+[1]*3", "[0]+[1]*5"]
DENSE = ["[0]+[1]", "[0]*3+[1]", "[0]*5+[1]"]


def _counts_as_the_table() -> bool:
    """The table is of one version of torch, and of the native attention."""
    like = torch.empty(4, 1, 2, 8)
    return torch.__version__.startswith("2.13.") and serves(like, like, like)


@pytest.mark.skipif(not _counts_as_the_table(), reason="other attention, or not torch 2.13")
@pytest.mark.parametrize("system", ["topk", "aoe", "top_p", "expert_choice", "lory"])
def test_a_layer_has_the_documented_number_of_operators(tmp_path, system):
    segments = {"lory_segment_length": LENGTH // 2} if system == "lory" else {}
    options = {"expert_selection": system} | segments
    worlds = (1,) if system == "lory" else (1, 2)
    of_experts, beyond_dense = [], []
    for world in worlds:
        found = [
            _operators_of_a_layer(
                Layout(world, ep=ep), options | {"moe_layer_freq": freq}, tmp_path
            )
            for ep, freq in ((world, EXPERTS), (1, DENSE))
        ]
        of_experts.append(found[0])
        beyond_dense.append(found[0] - found[1])
    assert of_experts + beyond_dense == _documented(system)
