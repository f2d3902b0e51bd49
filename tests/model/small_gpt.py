"""A GPT of a few thousand parameters, trained a few steps on made-up text under any layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model

from moe_parallel.config import Config, make_config, validate
from moe_parallel.parallel import initialize_groups
from moe_parallel.training.engine import Engine

VOCABULARY = 50

SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "init_method_std": 0.1,  # larger than usual: five steps are to change what is chosen
    "make_vocab_size_divisible_by": 8,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "seq_length": 8,
    "lr": 1e-2,
    "lr_warmup_iters": 1,
}

Options = dict[str, Any]
Weights = dict[str, numpy.ndarray]  # whole tensors by their names in the whole model
Piece = tuple[str, tuple[int, ...], tuple[int, ...], numpy.ndarray]  # name, shape, offset, values


@dataclass(frozen=True)
class Outcome:
    """What a few steps of training gave on one rank."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]  # that counted in the loss
    layers: list[dict[str, Any]]  # routing statistics summed over all ranks and steps
    pieces: list[Piece]


def train(options: Options, steps: int = 5) -> Outcome:
    """Build the model of `options` in the running world, train it, and take the world apart."""
    config = make_config(SIZES | options)
    engine = build(config)
    results = [engine.step(_micro_batches(config, step, engine)) for step in range(steps)]
    layers = engine.statistics.training.reduced([None]).summaries()
    pieces = weights_here(engine)
    parallel_state.destroy_model_parallel()
    return Outcome(
        [result.lm_loss for result in results],
        [result.grad_norm for result in results],
        [result.tokens for result in results],
        layers,
        pieces,
    )


def build(config: Config) -> Engine:
    """An engine on groups of its own; call parallel_state.destroy_model_parallel() afterwards."""
    validate(config, torch.distributed.get_world_size())
    groups = initialize_groups(config.parallel, config.virtual_stages)
    model_parallel_cuda_manual_seed(config.training.seed)
    return Engine(config, VOCABULARY, groups)


def initial_weights(options: Options) -> list[Piece]:
    """This rank's parts of the weights that a model of `options` starts with."""
    pieces = weights_here(build(make_config(SIZES | options)))
    parallel_state.destroy_model_parallel()
    return pieces


def _micro_batches(config: Config, step: int, engine: Engine) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of a step's micro-batches, which are the same in every layout.

    Token t is followed by t + 1 or t + 2; small tokens are frequent, so that experts are not
    loaded alike; one in four is masked out of the loss, in no regular pattern.
    """
    dp, size, length = engine.groups.dp, config.training.micro_batch_size, 8
    for number in range(dp.rank(), config.training.global_batch_size // size, dp.size()):
        generator = torch.Generator().manual_seed(100 * step + number)
        strides = torch.randint(1, 3, (size, length + 1), generator=generator)
        text = strides.cumsum(1) % VOCABULARY
        yield {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "position_ids": torch.arange(length).expand(size, -1),
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
    """Whole tensors from what all ranks hold; copies on several ranks must be equal."""
    weights: Weights = {}
    for name, shape, offset, values in (piece for pieces in ranks for piece in pieces):
        tensor = weights.setdefault(name, numpy.full(shape, numpy.nan, values.dtype))
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        before = tensor[place]
        assert (numpy.isnan(before) | (before == values)).all(), f"copies of {name} differ"
        tensor[place] = values
    for name, tensor in weights.items():
        assert not numpy.isnan(tensor).any(), f"no rank holds some of {name}"
    return weights
