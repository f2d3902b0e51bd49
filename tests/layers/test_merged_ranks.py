"""Merged experts split over tensor-parallel ranks equal unsplit ones; only activations are sent."""

from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_parallel.config import MergedSelection, make_config
from moe_parallel.parallel import destroy_groups, initialize_groups, seed_ranks
from tests.distributed import run_distributed
from tests.layers.cases import close
from tests.layers.single import run
from tests.layers.test_merged import dropping, lory, prefix
from tests.layers.whole_sequences import Arrays, build, direction, part, values


class Wire(TorchDispatchMode):
    """The collectives of this rank: (operation, shape of the largest tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            largest = max(tensors, key=torch.numel)
            self.carried.append((func.__name__.split(".")[0], tuple(largest.shape)))
        return func(*args, **(kwargs or {}))


def _on_this_rank(selection: MergedSelection, given: Arrays, sequence_parallel: bool) -> Any:
    """Output, gradients, collectives and statistics of a layer that is split over all ranks."""
    size = dist.get_world_size()
    groups = initialize_groups(make_config({"tensor_model_parallel_size": size}).parallel)
    seed_ranks(3, groups)  # for the dropout
    layer = build(selection, given, groups=groups, sequence_parallel=sequence_parallel)
    x, ways = given["x"], direction(given["x"])
    if sequence_parallel:
        x, ways = (numpy.split(whole, size)[groups.tp.rank()] for whole in (x, ways))
    # With sequence parallelism, Megatron-Core runs its layers in this state.
    state = get_cuda_rng_tracker().fork() if sequence_parallel else nullcontext()
    with Wire() as wire, state:
        output, gradients = run(layer, {"x": x}, ways)
    if sequence_parallel:  # as Megatron-Core does at the end of a step
        router = torch.from_numpy(gradients["w_router_ED"])
        assert layer.w_router_ED.sequence_parallel
        dist.all_reduce(router)
    layers = layer.context.statistics.training.reduced([None]).summaries()
    wanted_parts = {name: part(name, values, groups) for name, values in given.items()}
    shapes = {name: values.shape for name, values in wanted_parts.items() if name != "x"}
    assert shapes == {name: gradients[name].shape for name in shapes}
    dist.barrier()
    destroy_groups()
    return output, gradients, wire.carried, layers


def whole_gradients(ranks: list[Any], sequence_parallel: bool) -> Arrays:
    found = [gradients for _, gradients, *_ in ranks]
    joined = {
        "experts.w_gate_up_LD2F": numpy.concatenate(
            [each["experts.w_gate_up_LD2F"] for each in found], 3
        ),
        "experts.w_out_LFD": numpy.concatenate([each["experts.w_out_LFD"] for each in found], 1),
    }
    if sequence_parallel:
        joined["x"] = numpy.concatenate([each["x"] for each in found])
    for name in found[0].keys() - joined.keys():
        for each in found:
            numpy.testing.assert_array_equal(each[name], found[0][name], err_msg=name)
        joined[name] = found[0][name]
    return joined


SPLIT = {
    "lory": lory(),
    "prefix, uniform first segment": prefix(first="uniform"),
    "smear": dropping(0.3),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SPLIT)
def test_ranks_that_share_every_expert_equal_one(name, sequence_parallel):
    given = values(8, 2)  # the second segment of three tokens spans the ranks
    ((output, gradients, _, layers),) = run_distributed(1, _on_this_rank, SPLIT[name], given, False)
    ranks = run_distributed(2, _on_this_rank, SPLIT[name], given, sequence_parallel)
    outputs = [rank[0] for rank in ranks]
    if not sequence_parallel:
        numpy.testing.assert_array_equal(*outputs)
    close(numpy.concatenate(outputs) if sequence_parallel else outputs[0], output, 1e-12, "output")
    for key, gradient in whole_gradients(ranks, sequence_parallel).items():
        close(gradient, gradients[key], 1e-11, key)
    for *_, (counted,) in ranks:  # each token counts once
        assert counted.keys() == layers[0].keys()
        for key, value in layers[0].items():
            numpy.testing.assert_allclose(counted[key], value, rtol=1e-9, err_msg=key)


@pytest.mark.parametrize("experts", [2, 8])
def test_only_activations_travel(experts):
    given = values(8, 2, experts)
    activations = (8, 2, given["x"].shape[2])
    split = run_distributed(2, _on_this_rank, lory(), given, True)
    whole = run_distributed(2, _on_this_rank, lory(), given, False)
    for *_, carried, _ in split:
        assert carried == [
            ("_allgather_base_", activations),
            ("_reduce_scatter_base_", activations),
            ("_allgather_base_", activations),
            ("_reduce_scatter_base_", activations),
        ]
    for *_, carried, _ in whole:  # and the gradient of the router, which is not split
        router = ("allreduce_", given["w_router_ED"].shape)
        assert sorted(carried) == sorted([("allreduce_", activations)] * 2 + [router])
