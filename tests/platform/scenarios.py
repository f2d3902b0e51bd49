"""Scenarios for Megatron-Core on a CPU host; each one fails by raising on one of its ranks."""

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.timers import Timers
from torch import distributed as dist

from tests.platform.stock_gpt import build, forward_backward, step


def train() -> None:
    trained = build()
    losses = [loss for _ in range(5) for loss, _ in step(trained)]
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < 0.85 * losses[0], losses


def train_expert_parallel() -> None:
    step(build(ep=2))


def train_pipeline_with_tied_embeddings() -> None:
    step(build(pp=2, tied=True))


def train_with_distributed_optimizer() -> None:
    step(build(distributed_optimizer=True))


def evaluate() -> None:
    trained = build()
    before = {name: weight.detach().clone() for name, weight in trained.model.named_parameters()}
    trained.model.eval()
    with torch.no_grad():
        (first,), (second,) = (forward_backward(trained, forward_only=True) for _ in range(2))
    assert first == second
    assert all(torch.equal(before[name], now) for name, now in trained.model.named_parameters())


def time_a_section() -> None:
    timers = Timers(log_level=1, log_option="minmax")
    timers("section", log_level=1).start()
    timers("section").stop()
    timers.log(["section"])


def dropout_differs_between_tensor_parallel_ranks() -> None:
    """Ranks draw different numbers inside a fork, equal ones outside; a fork leaves no trace."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(3)
    outside = [torch.rand(8)]
    with get_cuda_rng_tracker().fork():
        inside = [torch.rand(8)]
    outside.append(torch.rand(8))
    with get_cuda_rng_tracker().fork():
        inside.append(torch.rand(8))

    model_parallel_cuda_manual_seed(3)
    assert torch.equal(torch.cat(outside), torch.rand(16)), "a fork moved the default state"
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.cat(inside), torch.rand(16)), "a fork did not go on where it was"
    ours, theirs = _of_both_ranks(torch.cat(inside))
    assert not torch.equal(ours, theirs)
    ours, theirs = _of_both_ranks(torch.cat(outside))
    assert torch.equal(ours, theirs)


def recompute() -> None:
    """A recomputed forward pass drops the same elements and leaves the random states unchanged."""
    parallel_state.initialize_model_parallel()
    (plain, state), (recomputed, state_after_recompute) = (
        _gradient_of_dropout(checkpointed) for checkpointed in (False, True)
    )
    assert torch.equal(plain, recomputed)
    assert torch.equal(state, state_after_recompute)
    assert (plain == 0).any() and (plain != 0).any()


def recompute_a_norm() -> None:
    """The output of a norm is gone after the forward pass, and has its gradient all the same."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(x.square().sin().sum(), x)
    recomputed = tensor_parallel.CheckpointWithoutOutput()
    y = recomputed.checkpoint(torch.square, x)
    z = y.sin()
    recomputed.discard_output_and_register_recompute(z)
    assert y.untyped_storage().nbytes() == 0
    z.sum().backward()
    assert torch.equal(x.grad, plain)


def rotary_angles_of_a_share() -> None:
    """Rank r of 2 has the angles of chunks r and 3 - r of the positions."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    rotary = RotaryEmbedding(
        4, 1.0, cp_group=parallel_state.get_context_parallel_group(), use_cpu_initialization=True
    )
    rank = dist.get_rank()
    chunks = torch.arange(8.0).view(4, 2)[[rank, 3 - rank]].flatten()
    assert torch.equal(rotary(8)[:, 0, 0, 0], chunks)


def repeat_a_step() -> None:
    """The rerun state machine repeats a step that gave NaN, with the same draws and data."""
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine, data = get_rerun_state_machine(), RerunDataIterator(iter(range(10)))
    torch.manual_seed(1)
    seen = []
    for result in (1.0, float("nan")):  # it does not check the first step
        while machine.should_run_forward_backward(data):
            seen.append((next(data), torch.rand(4).tolist()))
            machine.validate_result(
                torch.tensor(result), rejection_func=torch.isnan, message="", fatal=False
            )
        machine.should_checkpoint_and_exit()
    assert len(seen) == 3 and seen[0] != seen[1] == seen[2], seen


def load_fully_parallel() -> None:
    """Each rank reads a part of the checkpoint and receives the rest from the other ranks."""
    names = ["a", "b", "c", "d"]
    folder = _shared_folder()
    saved = {name: torch.full((4,), float(i)) for i, name in enumerate(names)}
    dist_checkpointing.save(_replicated(saved), folder)
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(folder), exchange_algo="broadcast"
    )
    empty = {name: torch.zeros(4) for name in names}
    loaded = dist_checkpointing.load(_replicated(empty), folder, strategy)
    assert all(torch.equal(loaded[name], saved[name]) for name in names)


def _replicated(tensors):
    rank = dist.get_rank()
    return {
        name: dist_checkpointing.ShardedTensor.from_rank_offsets(name, value, replica_id=rank)
        for name, value in tensors.items()
    }


def _shared_folder() -> str:
    import tempfile

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return str(folder[0])


def _gradient_of_dropout(checkpointed: bool):
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    x = torch.ones(64, requires_grad=True)

    def twice_dropped(x):
        with get_cuda_rng_tracker().fork():
            x = torch.nn.functional.dropout(x, 0.3)
        return torch.nn.functional.dropout(x, 0.3)

    y = tensor_parallel.checkpoint(twice_dropped, False, x) if checkpointed else twice_dropped(x)
    torch.rand(3)  # other draws between the forward and the backward pass
    (y * y).sum().backward()
    return x.grad, torch.get_rng_state()


def _of_both_ranks(tensor):
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor)
    return both
