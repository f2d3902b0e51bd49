"""The model of a checkpoint on the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_parallel.config import Config
from moe_parallel.evaluation.model import ReadingModel
from moe_parallel.parallel import destroy_groups, initialize_groups, seed_ranks
from moe_parallel.training.standalone import standalone_model, vocab_size_of


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
