"""Small models for generation, in any layout."""

from typing import Any

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import Config, parse_command_line, validate
from moe_parallel.generation.language_model import GenerationModel
from moe_parallel.parallel import Groups, initialize_groups
from moe_parallel.training.standalone import standalone_model
from tests.program import SMALL, flags

VOCABULARY = 20
PROMPTS = [[3, 7], [5, 1, 19, 4, 2], [6, 6, 0, 8, 11], [9, 2, 14, 3, 7, 1, 19, 4, 12]]

Options = dict[str, Any]


def small_model(options: Options) -> GenerationModel:
    """An untrained model on the ranks of `run_distributed`; call destroy_groups() afterward."""
    import torch

    # Large weights, so that no two tokens are almost equally probable.
    config = parse_command_line(flags(SMALL | {"init_method_std": 0.3} | options))
    validate(config, torch.distributed.get_world_size())
    return on_groups(config, initialize_groups(config.parallel))


def on_groups(config: Config, groups: Groups) -> GenerationModel:
    model_parallel_cuda_manual_seed(config.training.seed)
    chunk, _ = standalone_model(config, VOCABULARY, groups)
    chunk.eval()
    return GenerationModel(chunk, groups, VOCABULARY, config, VOCABULARY)
