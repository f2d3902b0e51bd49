"""torch's Adam in one pass, on every device."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from moe_parallel.training.optimizer import fuse_adam, optimizer_parts
from tests.distributed import run_distributed
from tests.tiers import rest_in_full
from tests.training.tiny_run import AOE, Layout, TinyRun


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


def test_other_optimizers_keep_their_kernel() -> None:
    part = optimizer_of(Parameter(torch.ones(3)), kind=torch.optim.Adagrad)
    part.optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    fuse_adam(part)
    part.optimizer.step()
    assert not part.optimizer.param_groups[0].get("fused")


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
