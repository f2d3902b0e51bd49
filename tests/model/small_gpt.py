"""A GPT of a few thousand parameters, trained in any layout from one checkpoint.

The text is made up and is the same in every layout.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.utils import unwrap_model

from moe_parallel.config import Config, make_config, validate
from moe_parallel.parallel import destroy_groups, initialize_groups, seed_ranks
from moe_parallel.training.checkpoint.checkpointer import Checkpointer, TrainingState
from moe_parallel.training.engine import Engine
from moe_parallel.training.optimizer import gather_weights

VOCABULARY = 50

SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "init_method_std": 0.1,  # larger than usual, so that a step changes the choices
    "make_vocab_size_divisible_by": 8,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "seq_length": 8,
    "lr": 1e-2,
    "lr_warmup_iters": 1,
}

#: Positions in the documents of two sequences; the first begins with the end of a document.
DOCUMENTS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0]])

Options = dict[str, Any]
Weights = dict[str, numpy.ndarray]  # whole tensors by their names in the whole model
Piece = tuple[str, tuple[int, ...], tuple[int, ...], numpy.ndarray]  # name, shape, offset, values


@dataclass(frozen=True)
class Outcome:
    """The results of a few training steps on one rank."""

    iterations: list[int]
    learning_rates: list[float]
    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]  # the number that counted in the loss
    layers: list[dict[str, Any]]  # routing statistics summed over all ranks and steps
    pieces: list[Piece]


def save_start(options: Options, directory: Path, steps: int = 1) -> Path:
    """Train the model of `options` from its initial weights; returns the checkpoint's path."""
    config = make_config(SIZES | options)
    engine = build(config)
    for step in range(steps):
        engine.step(micro_batches(config, step * _micro_batches_per_step(config), engine))
    samples = steps * config.training.global_batch_size
    state = TrainingState(steps, samples, samples * config.training.seq_length)
    checkpointer = _checkpointer(config, directory)
    path = checkpointer.save(state, engine.chunks, engine.optimizer, engine.scheduler)
    destroy_groups()
    return path


def train(options: Options, start: Path, steps: int = 2) -> Outcome:
    """Load a checkpoint into the model of `options` in the current world, and train it."""
    config = make_config(SIZES | options)
    engine = build(config)
    checkpointer = _checkpointer(config, start.parent)
    state = checkpointer.load(start, engine.chunks, engine.optimizer, engine.scheduler)
    first = state.consumed_samples // config.training.micro_batch_size
    results = [
        engine.step(micro_batches(config, first + step * _micro_batches_per_step(config), engine))
        for step in range(steps)
    ]
    layers = engine.statistics.training.reduced([None]).summaries()
    gather_weights(engine.chunks)
    pieces = weights_here(engine)
    destroy_groups()
    return Outcome(
        [state.iteration + step for step in range(1, steps + 1)],
        [result.learning_rate for result in results],
        [result.lm_loss for result in results],
        [result.grad_norm for result in results],
        [result.tokens for result in results],
        layers,
        pieces,
    )


def begin_each(models: dict[str, Options], directory: Path) -> dict[str, tuple[Path, Outcome]]:
    """For each model a checkpoint, and what follows from it in the same world."""
    found = {}
    for number, (name, options) in enumerate(models.items()):
        checkpoint = save_start(options, directory / str(number))
        found[name] = checkpoint, train(options, checkpoint)
    return found


def train_each(cases: dict[str, tuple[Path, Options]]) -> dict[str, Outcome]:
    """What follows from a checkpoint, for each model."""
    return {name: train(options, checkpoint) for name, (checkpoint, options) in cases.items()}


def build(config: Config) -> Engine:
    """An engine on its own groups; call destroy_groups() afterward."""
    validate(config, torch.distributed.get_world_size())
    groups = initialize_groups(config.parallel, config.virtual_stages)
    seed_ranks(config.training.seed, groups)
    return Engine(config, _vocabulary(config), groups)


def _vocabulary(config: Config) -> int:
    return config.data.vocab_size or VOCABULARY


def initial_weights(options: Options) -> list[Piece]:
    """This rank's parts of the initial weights of the model of `options`."""
    pieces = weights_here(build(make_config(SIZES | options)))
    destroy_groups()
    return pieces


def _checkpointer(config: Config, directory: Path) -> Checkpointer:
    layout = asdict(config.parallel)
    return Checkpointer(directory, keep_last=None, fingerprint={}, layout=layout, files={})


def _micro_batches_per_step(config: Config) -> int:
    return config.training.global_batch_size // config.training.micro_batch_size


def micro_batches(config: Config, first: int, engine: Engine) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of a step's micro-batches, from number `first` of the run on.

    A micro-batch with a given number is the same in every layout. Token t is followed by t + 1 or
    t + 2; small tokens are frequent, so that loads differ. One token in four is masked out of the
    loss, in no regular pattern. The sequences begin with different tokens: equal tokens would tie
    for a place in an expert's capacity, and rounding would decide which is dropped. Sequences
    have the `DOCUMENTS` if a token attends only to its own.
    """
    dp, size, length = engine.groups.dp, config.training.micro_batch_size, 8
    for number in range(dp.rank(), _micro_batches_per_step(config), dp.size()):
        generator = torch.Generator().manual_seed(first + number)
        strides = torch.randint(1, 3, (size, length + 1), generator=generator)
        text = (strides.cumsum(1) + 2 * torch.arange(size)[:, None]) % _vocabulary(config)
        own_documents = config.training.reset_attention_mask
        yield {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "position_ids": DOCUMENTS if own_documents else torch.arange(length).expand(size, -1),
            "loss_mask": (torch.rand(size, length, generator=generator) > 0.25).float(),
        }


def weights_here(engine: Engine) -> list[Piece]:
    """The parts of the weights that this rank holds, as its sharded state dict describes them."""
    pieces = []
    for chunk in unwrap_model(engine.chunks):
        for entry in chunk.sharded_state_dict().values():
            parts = entry.build() if hasattr(entry, "build") else entry
            for part in parts if isinstance(parts, list) else [parts]:
                if isinstance(part, ShardedTensor):
                    values = part.data.detach().numpy().copy()
                    pieces.append((part.key, part.global_shape, part.global_offset, values))
    return pieces


def whole(ranks: list[list[Piece]]) -> Weights:
    """Assemble whole tensors from the parts of all ranks; copies on several ranks must be equal."""
    weights: Weights = {}
    for name, shape, offset, values in (piece for pieces in ranks for piece in pieces):
        kind = numpy.result_type(values, numpy.float32)  # of integers too, one with a NaN
        tensor = weights.setdefault(name, numpy.full(shape, numpy.nan, kind))
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        before = tensor[place]
        assert (numpy.isnan(before) | (before == values)).all(), f"copies of {name} differ"
        tensor[place] = values
    for name, tensor in weights.items():
        assert not numpy.isnan(tensor).any(), f"no rank holds some of {name}"
    return weights
