"""The model of a configuration or a checkpoint, to analyze it: complete on a single process and in
fp32, in whatever layout and precision it was trained, or on the ranks of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.config import (
    CheckpointConfig,
    Config,
    Fp8Config,
    ParallelConfig,
    parse_command_line,
    read_command_line,
    validate,
)
from moe_parallel.config.run import EMBEDDED_VOCAB_SIZE
from moe_parallel.data.tokenizer import build_tokenizer
from moe_parallel.errors import InputError
from moe_parallel.evaluation.model import ReadingModel
from moe_parallel.model.gpt import build_model
from moe_parallel.parallel import Groups, destroy_groups, initialize_groups, seed_ranks
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from moe_parallel.platform.device import device
from moe_parallel.telemetry.statistics import RoutingStatistics
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.record import checked_file, read_record
from moe_parallel.training.run_folder import open_checkpoints


def standalone_config(
    flags: Sequence[str], *, config: str | None = None, load: str | None = None
) -> Config:
    """The configuration of `--config` or, without it, of the checkpoint that `--load` names.

    The settings of layout, precision and saving are left out.

    Args:
        flags: of the training program; they override the file.
        config: a YAML file.
        load: a run or one of its checkpoints.

    Raises InputError.
    """
    arguments = list(flags)
    if config is None and load is not None:
        config = str(checked_file(find_checkpoint(Path(load)), "config.yaml"))
    if config is not None:
        arguments += ["--config", config]
    alone = on_one_process(parse_command_line(arguments), load)
    validate(alone, world_size=1)
    return alone


def on_one_process(config: Config, load: str | None = None) -> Config:
    """The same configuration without the settings of layout, precision, graphs and saving."""
    return replace(
        config,
        parallel=ParallelConfig(),
        training=replace(config.training.without_graph, bf16=False),
        fp8=Fp8Config(),
        checkpoint=CheckpointConfig(load=load),
    )


def evaluation_config(flags: Sequence[str], load: str, world_size: int) -> Config:
    """The configuration to evaluate the checkpoint of --load on any number of ranks.

    The model and its precision are those of the checkpoint, and the layout that of the flags:
    without flags, every rank has a complete model. Nothing is trained or saved.

    Raises InputError.
    """
    file = checked_file(find_checkpoint(Path(load)), "config.yaml")
    line = read_command_line(flags)
    config = parse_command_line([*flags, "--config", str(file)])
    given = {field.name for field in fields(ParallelConfig)} & set(line.given)
    layout = {name: getattr(config.parallel, name) for name in given}
    if layout.get("context_parallel_size", 1) > 1:
        raise InputError(
            f"--context-parallel-size is {config.parallel.context_parallel_size}, but here no "
            "sequence is divided: leave it out"
        )
    # Sequences of any length, and one token at a time, could not be split over tp.
    layout |= {"sequence_parallel": False, "num_layers_per_virtual_pipeline_stage": None}
    backend = config.training.attention_backend
    training = replace(
        config.training.without_graph,
        micro_batch_size=1,
        global_batch_size=world_size,
        recompute_granularity=None,
        attention_backend="auto" if backend == "local" else backend,
    )
    alone = replace(
        config,
        parallel=ParallelConfig(**layout),
        training=training,
        fp8=Fp8Config(),
        checkpoint=CheckpointConfig(load=load),
    )
    validate(alone, world_size)
    return alone


@contextmanager
def single_process(config: Config, backend: str = "gloo") -> Iterator[Groups]:
    """Process groups of size 1 and seeded generators, destroyed when the context ends."""
    if not torch.cuda.is_available():
        adapt_megatron_to_cpu()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = initialize_groups(config.parallel)
        seed_ranks(config.training.seed, groups)
        yield groups
    finally:
        destroy_groups()
        dist.destroy_process_group()


def vocab_size_of(config: Config) -> int:
    """The vocabulary size of the model: the checkpoint's, or that with which training begins."""
    if config.checkpoint.load is None:
        data = config.data
        if data.vocab_size is None and data.data_path is not None:
            return build_tokenizer(data.tokenizer_type, data.tokenizer_model, None).vocab_size
        return data.vocab_size or EMBEDDED_VOCAB_SIZE
    checkpoint = find_checkpoint(Path(config.checkpoint.load))
    size = read_record(checkpoint)["fingerprint"].get("--vocab-size")
    if type(size) is not int:
        raise InputError(f"--load {checkpoint}: its checkpoint.json names no --vocab-size")
    return size


def standalone_model(
    config: Config, vocab_size: int, groups: Groups
) -> tuple[Any, RoutingStatistics]:
    """This rank's part of the model (Megatron-Core's GPTModel), with its routing statistics.

    Its weights are those of --load, or the initial ones. Raises InputError.
    """
    statistics = RoutingStatistics(config.model.num_layers, config.moe.num_experts or 1, device())
    with device():
        (model,) = build_model(config, config.padded_vocab_size(vocab_size), groups, statistics)
    if config.checkpoint.load is not None:
        checkpoints = open_checkpoints(config, vocab_size, groups)
        checkpoints.load(Path(config.checkpoint.load), [model], None, None)
    return model, statistics


@contextmanager
def open_model(config: Config) -> Iterator[ReadingModel]:
    """This rank's part of the model. Collective; torch.distributed is initialized.

    In the context the process groups of the layout exist. Raises InputError.
    """
    groups = initialize_groups(config.parallel)
    try:
        seed_ranks(config.training.seed, groups)
        vocab_size = vocab_size_of(config)
        chunk, _ = standalone_model(config, vocab_size, groups)
        chunk.eval()
        yield ReadingModel(chunk, groups, config, vocab_size)
    finally:
        destroy_groups()
