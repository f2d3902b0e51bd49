"""The configuration: frozen dataclasses, from which YAML keys, flags and help are generated."""

from moe_parallel.config.command_line import parse_command_line
from moe_parallel.config.config import Config, make_config, read_yaml
from moe_parallel.config.model import ModelConfig, MoEConfig, moe_layer_pattern
from moe_parallel.config.run import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from moe_parallel.config.selection import (
    SELECTIONS,
    AoESelection,
    Selection,
    TopKSelection,
    aoe_wide_size,
    selection_name,
)
from moe_parallel.config.validate import data_parallel_size, validate

__all__ = [
    "SELECTIONS",
    "AoESelection",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Selection",
    "TopKSelection",
    "TrainingConfig",
    "aoe_wide_size",
    "data_parallel_size",
    "make_config",
    "moe_layer_pattern",
    "parse_command_line",
    "read_yaml",
    "selection_name",
    "validate",
]
