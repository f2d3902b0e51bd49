"""Converts a checkpoint to one of another system, from which training can start.

The conversion runs on one process and in fp32, whatever layout and precision the training before
and after it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model

from moe_parallel.config import Config, LoggingConfig, validate
from moe_parallel.convert.to_aoe import (
    ConvertedLayer,
    convert_layers,
    copy_weights,
    draw_calibration,
)
from moe_parallel.data.datasets import Datasets
from moe_parallel.errors import InputError
from moe_parallel.evaluation.text_loss import measure_text_loss
from moe_parallel.parallel import Groups
from moe_parallel.training.checkpoint.checkpointer import TrainingState
from moe_parallel.training.engine import Engine
from moe_parallel.training.run_folder import begin_run, open_checkpoints
from moe_parallel.training.standalone import on_one_process, standalone_model
from moe_parallel.training.text import Text, open_text


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    layers: list[ConvertedLayer]  # [] if weights were only copied
    tokens: tuple[int, int]  # numbers of tokens: for the fit, and held out for measurements
    losses: Mapping[str, tuple[float, float]]  # by domain, nats/token: before and after
    checkpoint: Path


def convert(
    source: Config,
    target: Config,
    groups: Groups,
    rank: int | None,
    calibration_samples: int,
    say: Callable[[str], None],
) -> Conversion:
    """Write a checkpoint of iteration 0 into the --save of `target`, with fresh optimizer state.

    Args:
        source: the configuration of the checkpoint in its --load.
        target: the result of `configuration.converted_config`.
        groups: groups of one process.
        rank: of the factors of W_g; None: weights are copied as they are.
        calibration_samples: the number of training samples for the fit; ignored without a rank.
        say: called with a line for every step.

    Raises InputError.
    """
    here = on_one_process(target)
    validate(here, world_size=1)
    largest = min(source.model.hidden_size, source.expert_width)
    if rank is not None and rank > largest:
        raise InputError(
            f"--aoe-low-rank-size is {rank}, but W_g of --load is {source.model.hidden_size} x "
            f"{source.expert_width}: choose at most {largest}"
        )
    text = open_text(replace(here, checkpoint=source.checkpoint))  # the text of its training
    # Raises errors before the long work.
    checkpoints = open_checkpoints(target, text.vocab_size, groups, text.tokenizer)
    data = text.datasets(here)
    old, _ = standalone_model(
        replace(here, selection=source.selection, checkpoint=source.checkpoint),
        text.vocab_size,
        groups,
    )
    engine = Engine(here, text.vocab_size, groups)
    (new,) = unwrap_model(engine.chunks)
    layers, tokens = [], (0, 0)
    if rank is None:
        copy_weights(old, new)
    else:
        calibration = draw_calibration(
            data.train,
            calibration_samples,
            here.training.micro_batch_size,
            here.training.seed,
            engine.device,
        )
        tokens = calibration.tokens
        k = source.selection.choices_per_token
        assert k is not None
        for layer in convert_layers(old, new, calibration, k, rank):
            say(f"layer {layer.number}: converted")
            layers.append(layer)
    losses = {
        domain: (loss(old), loss(new)) for domain, loss in _losses(here, text, data, groups).items()
    }
    begin_run(target, text.tokenizer)
    path = checkpoints.save(
        TrainingState(0, 0, 0), engine.chunks, engine.optimizer, engine.scheduler
    )
    return Conversion(layers, tokens, losses, path)


def _losses(
    config: Config, text: Text, data: Datasets, groups: Groups
) -> dict[str, Callable[[Any], float]]:
    """By domain, a function that measures a model on the first validation samples, in
    nats/token."""
    # A model is measured here even if its run had no evaluation.
    iters = config.logging.eval_iters or LoggingConfig().eval_iters
    samples = iters * config.training.global_batch_size

    def of_domain(dataset: Any) -> Callable[[Any], float]:
        def loss(model: Any) -> float:
            sizes = text.bytes_per_token(next(model.parameters()).device)
            return measure_text_loss([model], dataset, sizes, config.training, groups, samples).loss

        return loss

    return {domain: of_domain(dataset) for domain, dataset in data.valid.items()}


COLUMNS = ("layer", "choices", "before", "x W_g off")


def conversion_table(conversion: Conversion, k: int | None, num_experts: int | None) -> str:
    """The table, as lines for a terminal."""
    lines = []
    if conversion.layers and k and num_experts:
        fitted, held_out = conversion.tokens
        lines += [
            f"fitted to {fitted:,} tokens of training text, measured on {held_out:,} others",
            "".join(f"{column:>11}" for column in COLUMNS),
        ]
        for layer in conversion.layers:
            numbers = (layer.after, layer.before, layer.gate_error)
            cells = "".join(f"{number:>11.3f}" for number in numbers)
            lines.append(f"{layer.number:>11}{cells}")
        lines += [f"(choices at random: {k / num_experts:.3f})", ""]
    width = max([len(domain) for domain in conversion.losses] + [len("nats/token")])
    lines.append(f"{'nats/token':<{width}}{'source':>11}{'converted':>11}")
    for domain, losses in conversion.losses.items():
        lines.append(f"{domain:<{width}}" + "".join(f"{loss:>11.4f}" for loss in losses))
    return "\n".join(lines)


def conversion_json(conversion: Conversion, **facts: Any) -> str:
    """The complete result and further `facts` about the conversion, as JSON."""
    fitted, held_out = conversion.tokens
    content = facts | {
        "calibration": {"fitted_tokens": fitted, "held_out_tokens": held_out},
        "layers": [asdict(layer) for layer in conversion.layers],
        "loss": {
            domain: {"source": losses[0], "converted": losses[1]}
            for domain, losses in conversion.losses.items()
        },
        "checkpoint": str(conversion.checkpoint),
    }
    return json.dumps(content, indent=1) + "\n"
