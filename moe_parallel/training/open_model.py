"""The model of a checkpoint on the ranks of a job, or on one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moe_parallel.config import Config
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.generation.language_model import GenerationModel
from moe_parallel.parallel import destroy_groups, initialize_groups, seed_ranks
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from moe_parallel.training.standalone import evaluation_config, standalone_model, vocab_size_of
from moe_parallel.training.text import open_tokenizer


@contextmanager
def open_model(config: Config, tokenizer: Tokenizer) -> Iterator[GenerationModel]:
    """This rank's part of the model. Collective; torch.distributed is initialized.

    In the context the process groups of the layout exist. Raises InputError.
    """
    groups = initialize_groups(config.parallel)
    try:
        seed_ranks(config.training.seed, groups)
        vocab_size = vocab_size_of(config)
        chunk, _ = standalone_model(config, vocab_size, groups)
        chunk.eval()
        yield GenerationModel(chunk, groups, tokenizer.vocab_size, config, vocab_size)
    finally:
        destroy_groups()


@contextmanager
def open_alone(load: str) -> Iterator[tuple[GenerationModel, Tokenizer]]:
    """The complete model of a checkpoint, and its tokenizer, on this process.

    Raises InputError.
    """
    begins = not dist.is_initialized()
    if begins:
        if not torch.cuda.is_available():
            adapt_megatron_to_cpu()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = evaluation_config([], load, 1)
        tokenizer = open_tokenizer(config)
        with open_model(config, tokenizer) as model:
            yield model, tokenizer
    finally:
        if begins:
            dist.destroy_process_group()
