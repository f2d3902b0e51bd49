"""Experts' weights under expert and expert-tensor parallelism, their outputs and main gradients."""

from typing import Any

import numpy
import pytest
import torch
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.experts.experts import LowRankExperts, SwiGLUExperts
from moe_parallel.ops import extension, select_backend
from moe_parallel.parallel import Groups, destroy_groups, groups_of_one, initialize_groups
from tests.distributed import run_distributed
from tests.oracles import layers as oracle

E, D, F, R = 4, 5, 6, 3
BACKENDS = ["reference"] + ["native"] * extension.is_built()
COUNTS = [3, 0, 1, 2]  # rows of each expert


def swiglu(groups: Groups, backend: str = "reference") -> SwiGLUExperts:
    return SwiGLUExperts(E, D, F, groups, select_backend(backend), torch.float64)


def low_rank(groups: Groups, backend: str = "reference") -> LowRankExperts:
    return LowRankExperts(E, D, R, F, groups, select_backend(backend), torch.float64)


KINDS = {"swiglu": swiglu, "low_rank": low_rank}
SHAPES = {
    "swiglu": {"w_gate_up_LD2F": (E, D, 2, F), "w_out_LFD": (E, F, D)},
    "low_rank": {"w_up_LRW": (E, R, F), "w_p_LDW": (E, D, F), "w_out_LWD": (E, F, D)},
}


def given(kind: str) -> dict[str, numpy.ndarray]:
    rng = numpy.random.default_rng(3)
    values = {name: rng.normal(size=shape) for name, shape in SHAPES[kind].items()}
    return values | {
        "x": rng.normal(size=(sum(COUNTS), D)),
        "probs": rng.random(sum(COUNTS)).astype("float32"),
        "w_down": rng.normal(size=(E, D, R)),
    }


def apply(experts: Any, kind: str, values: dict[str, Any], which: range) -> torch.Tensor:
    """The output of the experts `which` for their rows."""
    starts = numpy.cumsum([0, *COUNTS])
    rows = slice(starts[which.start], starts[which.stop])
    x, probs = torch.from_numpy(values["x"])[rows], torch.from_numpy(values["probs"])[rows]
    return compute(experts, kind, x, probs, COUNTS[which.start : which.stop], values["w_down"])


def compute(
    experts: Any, kind: str, x: torch.Tensor, probs: torch.Tensor, counts: list[int], w_down: Any
) -> torch.Tensor:
    """The output for rows that are sorted by expert, one choice each."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    row_map = experts.ops.routing_map(owners[:, None], len(counts))
    down = () if kind == "swiglu" else (experts.local(torch.as_tensor(w_down)),)
    return experts(x, probs[:, None], row_map, *down)


def expected(kind: str) -> numpy.ndarray:
    v = given(kind)
    rows = []
    owners = numpy.repeat(numpy.arange(E), COUNTS)
    for x, gate, e in zip(v["x"], v["probs"], owners, strict=True):
        if kind == "swiglu":
            gate_up = v["w_gate_up_LD2F"][e]
            y = oracle.swiglu_expert(x, gate_up[:, 0], gate_up[:, 1], v["w_out_LFD"][e])
        else:
            y = oracle.autonomous_expert(
                x, v["w_down"][e], v["w_up_LRW"][e], v["w_p_LDW"][e], v["w_out_LWD"][e]
            )
        rows.append(gate * y)
    return numpy.array(rows)


def _one_rank(kind: str, options: dict[str, int]) -> dict[str, Any]:
    """This rank's part of the weights by its sharded state dict, with the values of `given`."""
    groups = initialize_groups(make_config(options).parallel)
    experts = KINDS[kind](groups)
    shards = experts.sharded_state_dict("layer.")
    for name, weight in experts.named_parameters():
        shard = shards["layer." + name]
        place = tuple(
            slice(o, o + n) for o, n in zip(shard.global_offset, weight.shape, strict=True)
        )
        with torch.no_grad():
            weight.copy_(torch.from_numpy(given(kind)[name][place]))
    first = groups.ep.rank() * experts.num_local_experts
    which = range(first, first + experts.num_local_experts)
    y = apply(experts, kind, given(kind), which)
    seen = {
        "first": first,
        "etp": groups.etp.rank(),
        "global": {name: shards["layer." + name].global_shape for name in SHAPES[kind]},
        "replicas": {shard.replica_id[2] for shard in shards.values()},
        "edp": groups.edp.rank(),
        "y": y.detach().numpy(),
        "attributes": {
            (w.allreduce, w.tensor_model_parallel, w.partition_stride) for w in experts.parameters()
        },
    }
    dist.barrier()
    destroy_groups()
    return seen


def _layout(tp: int, ep: int, etp: int) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "world, tp, ep, etp, reduced_like_dense",
    [
        (2, 1, 2, 1, False),
        (2, 1, 1, 2, False),  # etp != tp: the replicas are not the data-parallel ranks
        (2, 2, 1, 1, False),
        (2, 2, 1, 2, True),
        (2, 1, 1, 1, True),
        (4, 1, 2, 2, False),
    ],
)
def test_shards_together_compute_the_whole(kind, world, tp, ep, etp, reduced_like_dense):
    ranks = run_distributed(world, _one_rank, kind, _layout(tp, ep, etp))
    copies = world // (ep * etp)
    wanted = numpy.split(expected(kind), numpy.cumsum(COUNTS)[:-1])
    for first in range(0, E, E // ep):
        sum_of_shards = sum(seen["y"] for seen in ranks if seen["first"] == first) / copies
        rows = numpy.concatenate(wanted[first : first + E // ep])
        numpy.testing.assert_allclose(sum_of_shards, rows, rtol=1e-12, atol=1e-12)
    for seen in ranks:
        assert seen["global"] == SHAPES[kind]
        assert seen["attributes"] == {(reduced_like_dense, True, 1)}
        assert seen["replicas"] == {seen["edp"]}
    # Every part has one main copy, and no two ranks have the same replica number for it.
    assert len({(seen["first"], seen["etp"], seen["edp"]) for seen in ranks}) == world


def experts_of(kind: str, backend: str, main: bool):
    """Experts with random weights; if `main`, with main gradients of ones."""
    experts = KINDS[kind](groups_of_one(), backend)
    generator = torch.Generator().manual_seed(5)
    for weight in experts.parameters():
        with torch.no_grad():
            weight.normal_(generator=generator)
        if main:
            weight.main_grad = torch.ones_like(weight)
            weight.grad_added_to_main_grad = False
    if main:
        experts.add_to_main_gradients()
    return experts


def backward(experts, kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(sum(COUNTS), D, dtype=torch.float64, generator=generator)
    w_down = torch.randn(E, D, R, dtype=torch.float64, generator=generator)
    y = compute(experts, kind, x, torch.rand(len(x), generator=generator), COUNTS, w_down)
    (y * torch.linspace(-1, 1, D, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_added_and_marked(kind, backend):
    plain, fused = experts_of(kind, backend, main=False), experts_of(kind, backend, main=True)
    backward(plain, kind)
    for _ in range(2):  # micro-batches; between them the hook drops weight.grad
        backward(fused, kind)
        for weight in fused.parameters():
            assert weight.grad.shape == weight.shape  # it exists, but its values have no meaning
            assert weight.grad_added_to_main_grad
            weight.grad = None
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.main_grad, 1 + 2 * one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_added_all_the_same_is_zero(kind):
    experts = experts_of(kind, BACKENDS[-1], main=True)
    for weight in experts.parameters():
        weight.zero_out_wgrad = True
    backward(experts, kind)
    for weight in experts.parameters():
        assert not weight.grad.any()
