"""The least memory that a rank needs to train a model, by arithmetic, before it is built.

A configuration that cannot fit is refused in a second, instead of filling the memory for minutes
until the kernel kills some process. The result is a lower bound, so that nothing that fits is
refused: weights, gradients, optimizer state, and the activations that every implementation needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.collective_errors import agree, exchange
from moe_parallel.config import Config
from moe_parallel.config.message import counted
from moe_parallel.errors import InputError
from moe_parallel.model.parameters import sizes_of_parts
from moe_parallel.parallel import Groups
from moe_parallel.platform.device import device, free_host_memory, free_memory, memory_owner


@dataclass(frozen=True)
class Parameters:
    """The numbers of parameters of a rank, by the ranks that may divide their optimizer state."""

    dense: int  # by the data-parallel ranks
    expert: int  # by the ranks with the same experts
    largest: int  # of the largest complete matrix, which is drawn in fp32 before it is split


def check_memory(config: Config, vocab_size: int, groups: Groups) -> None:
    """Raise InputError if the model cannot fit in the memory that is free now. Collective.

    Args:
        vocab_size: of the tokenizer, or less.
        groups: the groups over which the model is divided.
    """
    agree(lambda: _check_indices(config))
    needed = least_memory(config, vocab_size, groups)
    ranks = exchange((memory_owner(), needed, free_memory()))
    for owner in dict.fromkeys(owner for owner, _, _ in ranks):
        needs = [need for other, need, _ in ranks if other == owner]
        free = max(free for other, _, free in ranks if other == owner)
        if sum(needs) > free:
            raise InputError(
                f"the model, its gradients and optimizer state take {_gib(sum(needs))} or more on "
                f"{counted(len(needs), 'rank')}, and {_gib(free)} are free there: lower "
                "--num-layers, --hidden-size, --num-experts, --ffn-hidden-size, "
                "--moe-ffn-hidden-size, --micro-batch-size or --seq-length, or divide it over more "
                "ranks"
            )


def _check_indices(config: Config) -> None:
    """Raise InputError if the order of the samples (int32 pair and int32 each) exceeds memory."""
    training = config.training
    needed, free = 12 * training.train_iters * training.global_batch_size, free_host_memory()
    if needed > free:
        raise InputError(
            f"--train-iters {training.train_iters} with --global-batch-size "
            f"{training.global_batch_size} take indices of {_gib(needed)} or more, and "
            f"{_gib(free)} of memory are free: lower one of them"
        )


def least_memory(config: Config, vocab_size: int, groups: Groups) -> int:
    """The least memory in bytes that this rank needs, to build the model or to train it."""
    held = parameters_of_rank(config, vocab_size, groups)
    both = held.dense + held.expert
    shares = (groups.cp.size() * groups.dp.size(), groups.edp.size())
    if not config.parallel.use_distributed_optimizer:
        shares = (1, 1)
    weight = 2 if config.training.bf16 else 4
    gradient, master = 4, 4 if config.training.bf16 else 0
    moments = 4 if config.optimizer.optimizer == "muon" else 8  # Muon's, or the two of Adam
    optimizer = held.dense // shares[0] + held.expert // shares[1]
    trained = (weight + gradient) * both + master * optimizer
    return max(
        weight * both + 4 * held.largest,  # building
        trained + _activations(config, vocab_size, groups),  # the first step
        trained + moments * optimizer,
    )


def parameters_of_rank(config: Config, vocab_size: int, groups: Groups) -> Parameters:
    """The parameters of this rank."""
    parts, layers = sizes_of_parts(config, vocab_size, groups), _layers_of_stage(config, groups)
    held = [parts["moe layer" if is_moe else "dense layer"] for is_moe in layers]
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    if first:
        held.append(parts["embedding"])
    if last:
        held.append(parts["head"])
    tied = not config.model.untie_embeddings_and_output_weights
    copied = parts["embedding"].table if last and tied and not first else 0
    widths = {True: config.expert_width, False: config.model.ffn_hidden_size}
    rows = config.padded_vocab_size(vocab_size) if first or last else 0
    hidden = config.model.hidden_size
    largest = max(rows, hidden, *(widths[moe] for moe in layers)) * hidden
    dense = sum(part.dense for part in held) + copied
    return Parameters(dense, sum(part.expert for part in held), largest)


def _layers_of_stage(config: Config, groups: Groups) -> list[bool]:
    """Which of this pipeline rank's layers are MoE layers."""
    virtual, pp = config.virtual_stages or 1, groups.pp.size()
    each = config.model.num_layers // (pp * virtual)
    first = [(stage * pp + groups.pp.rank()) * each for stage in range(virtual)]
    return [config.moe_layers[start + number] for start in first for number in range(each)]


def _activations(config: Config, vocab_size: int, groups: Groups) -> int:
    """The input of each layer for the backward pass, and on the last stage fp32 logits.

    If the loss is computed in chunks of tokens, they are those of a chunk, and the head's
    gradient in fp32 is kept too.
    """
    training, tp = config.training, groups.tp.size()
    tokens = training.micro_batch_size * training.seq_length // groups.cp.size()
    value = 2 if training.bf16 else 4
    split = tp if config.parallel.sequence_parallel else 1
    inputs = len(_layers_of_stage(config, groups)) * tokens * config.model.hidden_size * value
    last = groups.pp.rank() == groups.pp.size() - 1
    rows = config.padded_vocab_size(vocab_size) // tp
    chunk = training.tokens_of_loss_chunk(device().type)
    head = min(tokens, chunk) + config.model.hidden_size if chunk else tokens
    return inputs // split + (4 * head * rows if last else 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
