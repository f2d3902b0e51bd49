"""--pack-weights-once: the steps are the same, and each weight is packed once in each of them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moe_parallel.experts.right_factors import MultipliesRows, weights_packed_once
from moe_parallel.ops import Ops, extension
from moe_parallel.ops.types import PackWeights
from tests import systems
from tests.distributed import run_distributed
from tests.ops.cases import packs
from tests.training.tiny_run import OVERLAP, Layout, TinyRun

Options = dict[str, Any]

ONCE = {"pack_weights_once": True, "bf16": True}
AOE = systems.options("aoe")
#: Widths whose products are packed, also if etp2 halves them.
WIDE = {"hidden_size": 384, "moe_ffn_hidden_size": 768, "num_layers": 2, "moe_layer_freq": 1}
WIDE_AOE = {"aoe_low_rank_size": 32, "aoe_wide_size": 768}

#: The layout, and options of a run.
CASES: dict[str, tuple[Layout, Options]] = {
    "topk": (Layout(), {}),
    "aoe": (Layout(), AOE),
    "topk, recomputed": (Layout(), {"recompute_granularity": "full"}),
    "aoe, within a budget": (Layout(), AOE | {"moe_activation_budget": 0.01}),
    "topk, ep2, two parts, overlapped": (
        Layout(2, ep=2, distributed=True),
        OVERLAP | {"moe_dispatch_parts": 2, "gradient_accumulation_fusion": True},
    ),
    "aoe, ep2, two parts, overlapped": (
        Layout(2, ep=2, distributed=True),
        AOE | OVERLAP | {"moe_dispatch_parts": 2},
    ),
    "topk, etp2": (Layout(2, etp=2), {}),
    "topk, pp2, virtual": (
        Layout(2, pp=2),
        {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1},
    ),
}


def _both(cases: dict[str, tuple[Layout, Options]], path: Path) -> dict[str, Any]:
    """Three steps of each case, packed in every product and once a step."""
    module = extension.load()
    module.set_cpu_products(module.CpuProducts.PACKED)
    found = {}
    for name, (layout, options) in cases.items():
        runs = []
        for once in (False, True):
            wide = WIDE | (WIDE_AOE if "aoe_low_rank_size" in options else {})
            chosen = {"moe_backend": "native"} | wide | options | ONCE | {"pack_weights_once": once}
            run = TinyRun(layout, path, options=chosen)
            runs.append(run.steps(3))
            run.close()
        found[name] = runs
    return found


@packs
@pytest.mark.skipif(not extension.is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("world", [1, 2])
def test_weights_packed_once_change_no_bit(world: int, tmp_path: Path) -> None:
    """The weights change in every step, so that copies of another step would show."""
    cases = {name: case for name, case in CASES.items() if case[0].world == world}
    for found in run_distributed(world, _both, cases, tmp_path):
        for name, (each_product, once) in found.items():
            assert once == each_product, name
            assert len(set(once)) == 3, name


@dataclass
class Packed:
    """What was packed in two steps."""

    by_step: list[int]  # how often a weight was
    weights: set[str]
    left: int  # copies that are there afterward, and after an error
    of_parts: list[str]  # what happens where the experts are divided into parts


def _packed(options: Options, path: Path) -> Packed:
    run = TinyRun(Layout(), path, options=options)
    names = {weight.data_ptr(): name for name, weight in run.parameters()}
    modules = [module for chunk in run.engine.chunks for module in chunk.modules()]
    experts = [module for module in modules if isinstance(module, MultipliesRows)]
    packed: list[str] = []
    for each in experts:
        each.ops = replace(each.ops, pack_weights=_recording(each.ops, names, packed))
    by_step = []
    for _ in range(2):
        before = len(packed)
        run.steps(1)
        by_step.append(len(packed) - before)
    left = _copies(experts)
    with pytest.raises(KeyError), weights_packed_once(experts):
        _copies(experts)
        raise KeyError
    left += _copies(experts)
    first, number = experts[0], len(packed)
    first.register_forward_pre_hook(lambda *_: packed.append("waited"))
    with weights_packed_once([first]):
        first.right_factors_of_parts(2, *first.parameters())
    run.close()
    return Packed(by_step, set(packed[: sum(by_step)]), left, packed[number:])


def _recording(ops: Ops, names: dict[int, str], packed: list[str]) -> PackWeights:
    def pack(w_EIO: Tensor, parts: int = 1) -> list[Tensor]:
        packed.append(names[w_EIO.data_ptr()])
        return ops.pack_weights(w_EIO, parts)

    return pack


def _copies(experts: list[MultipliesRows]) -> int:
    return sum(len(each.right_factors(*each.parameters()).packed) for each in experts)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (ONCE, ["w_gate_up_LD2F", "w_out_LFD"]),
        (ONCE | AOE, ["w_out_LWD", "w_p_LDW", "w_up_LRW"]),
        (ONCE | {"micro_batch_size": 4}, []),  # one micro-batch
        ({"bf16": True}, []),
    ],
    ids=["topk", "aoe", "one micro-batch", "without the flag"],
)
def test_each_weight_is_packed_once_a_step(
    options: Options, weights: list[str], tmp_path: Path
) -> None:
    (found,) = run_distributed(1, _packed, options, tmp_path)
    assert {name.rpartition(".")[2] for name in found.weights} == set(weights)
    assert len(found.weights) == 3 * len(weights)  # layers of experts
    assert found.by_step == [len(found.weights)] * 2
    assert found.left == 0
    # --overlap-param-gather gathers weights in a hook.
    assert found.of_parts[0] == "waited"
    assert "waited" not in found.of_parts[1:]
