"""Megatron-Core's optimizer as a run uses it: one pass of Adam, sums in pieces, late weights."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch.nn import Parameter

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups
from moe_parallel.training import optimizer as optimizer_module
from moe_parallel.training.optimizer import (
    PIECE,
    add_in_pieces,
    fuse_adam,
    gather_weights,
    optimizer_parts,
)
from tests import systems
from tests.distributed import run_distributed
from tests.model.small_gpt import SIZES, build, micro_batches
from tests.tiers import rest_in_full
from tests.training.tiny_run import AOE, OVERLAP, Layout, TinyRun


@pytest.mark.parametrize("shape", [(), (3, 5), (PIECE,), (2, PIECE + 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_are_those_of_one_addition(shape, dtype):
    total, x = torch.randn(shape), torch.randn(shape).to(dtype)
    wanted = total + x
    add_in_pieces(total, x)
    assert torch.equal(total, wanted)


BF16 = {"bf16": True, "global_batch_size": 8, "micro_batch_size": 2}


def _three_steps(options):
    config = make_config(SIZES | options)
    engine = build(config)
    steps = [engine.step(micro_batches(config, 4 * step, engine)) for step in range(3)]
    destroy_groups()
    return [(step.lm_loss, step.grad_norm) for step in steps]


def _train_both_ways(options):
    in_pieces = _three_steps(options)
    with mock.patch.object(optimizer_module, "_is_added_slowly", return_value=False) as asked:
        at_once = _three_steps(options)
    assert asked.call_count > 0
    return in_pieces, at_once


@pytest.mark.parametrize("world", rest_in_full([1, 2], 2))
def test_a_run_in_bf16_is_the_run_of_megatrons_hook(world):
    """Two ranks reduce gradients while others are still computed, which the hook begins."""
    options = systems.options("aoe") | BF16
    if world == 2:
        options |= {"overlap_grad_reduce": True, "ddp_bucket_size": 2000}
    for in_pieces, at_once in run_distributed(world, _train_both_ways, options):
        assert in_pieces == at_once
        assert len(set(in_pieces)) == 3


def optimizer_of(*weights: Parameter, kind: type = torch.optim.AdamW) -> SimpleNamespace:
    """A stand-in for Megatron-Core's optimizer."""
    return SimpleNamespace(optimizer=kind(weights, lr=0.1, weight_decay=0.01))


def stepped(*, fused: bool, steps: int = 3) -> torch.Tensor:
    weight = Parameter(torch.linspace(-1, 1, 9))
    optimizer = optimizer_of(weight)
    if fused:
        fuse_adam(optimizer)
    for step in range(steps):
        weight.grad = torch.linspace(1, 2, 9) ** step
        optimizer.optimizer.step()
    assert [bool(group["fused"]) for group in optimizer.optimizer.param_groups] == [fused]
    return weight.detach()


def test_a_step_is_the_same() -> None:
    torch.testing.assert_close(stepped(fused=True), stepped(fused=False))


@pytest.mark.parametrize("chained", [False, True])
def test_a_loaded_number_of_steps_goes_to_the_device_of_the_weights(chained: bool) -> None:
    weight, unused = (Parameter(torch.zeros(3, device="meta")) for _ in range(2))  # like a GPU
    part = optimizer_of(weight, unused)
    part.optimizer.state[weight] = {
        "step": torch.tensor(5.0),  # as torch counts on a CPU, and as a checkpoint is loaded
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
    fuse_adam(SimpleNamespace(chained_optimizers=[part]) if chained else part)
    weight.grad = torch.zeros_like(weight)
    part.optimizer.step()
    assert part.optimizer.state[weight]["step"].device == weight.device
    assert unused not in part.optimizer.state


RUNS = {
    "one": (Layout(), {}),
    "bf16, ep2": (Layout(2, ep=2), AOE | {"bf16": True}),
    "ep2, distributed": (Layout(2, ep=2, distributed=True), AOE),
}


def _are_fused(layout, options, path):
    """After a step: of each group of weights of each part, whether one pass updates it."""
    run = TinyRun(layout, path, options=options)
    run.steps(1)
    parts = optimizer_parts(run.engine.optimizer)
    return [[group["fused"] for group in part.optimizer.param_groups] for part in parts]


@pytest.mark.parametrize("name", rest_in_full(RUNS, "ep2, distributed"))
def test_a_training_step_updates_all_weights_in_one_pass(tmp_path, name) -> None:
    layout, options = RUNS[name]
    for parts in run_distributed(layout.world, _are_fused, layout, options, tmp_path):
        assert len(parts) == (2 if layout.ep > 1 else 1)  # dense weights, and divided experts
        assert all(groups and all(groups) for groups in parts)


def _weights(run):
    (model,) = unwrap_model(run.engine.chunks)
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


def _two_steps(path):
    """On a rank: (buckets, weights after the steps, gathered weights, weights without overlap)."""
    layout = Layout(2, distributed=True)
    run = TinyRun(layout, path, options=AOE | OVERLAP)
    run.steps(2)  # the first has a learning rate of 0
    after = _weights(run)
    gather_weights(run.engine.chunks)
    gathered, buckets = _weights(run), len(run.engine.chunks[0].bucket_groups)
    run.close()
    run = TinyRun(layout, path, options=AOE)
    run.steps(2)
    gather_weights(run.engine.chunks)
    return buckets, after, gathered, _weights(run)


def test_a_rank_has_its_share_until_it_asks_for_the_rest(tmp_path):
    """--overlap-param-gather: weights arrive in the next forward pass, or when asked for."""
    ranks = run_distributed(2, _two_steps, tmp_path)
    updated = torch.zeros(len(ranks[0][1]), dtype=torch.int)
    for buckets, after, gathered, expected in ranks:
        assert buckets > 5
        torch.testing.assert_close(gathered, expected, rtol=1e-5, atol=1e-7)
        updated += (after == gathered).int()
        assert not torch.equal(after, gathered)
    assert updated.min() == 1  # each weight is updated by one of the ranks
