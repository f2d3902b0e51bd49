"""Small models that read text, in any layout."""

from typing import Any

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import parse_command_line, validate
from moe_parallel.evaluation.model import ReadingModel
from moe_parallel.parallel import initialize_groups
from moe_parallel.training.standalone import standalone_model
from tests.program import SMALL, flags

VOCABULARY = 20


def small_model(options: dict[str, Any]) -> ReadingModel:
    """An untrained model on the ranks of `run_distributed`; call destroy_groups() afterward."""
    # Large weights, so that no two tokens are almost equally probable.
    config = parse_command_line(flags(SMALL | {"init_method_std": 0.3} | options))
    validate(config, torch.distributed.get_world_size())
    groups = initialize_groups(config.parallel)
    model_parallel_cuda_manual_seed(config.training.seed)
    chunk, _ = standalone_model(config, VOCABULARY, groups)
    chunk.eval()
    return ReadingModel(chunk, groups, config, VOCABULARY)
