"""The configuration: frozen dataclasses, from which YAML keys, flags and help are generated."""

from moe_parallel.config.command_line import (
    CommandLine,
    parse_command_line,
    read_command_line,
    read_yaml,
)
from moe_parallel.config.config import Config, make_config, validate, validate_layer
from moe_parallel.config.fp8 import Fp8Config
from moe_parallel.config.model import ModelConfig, moe_layer_pattern
from moe_parallel.config.moe import MoEConfig
from moe_parallel.config.parallel import ParallelConfig
from moe_parallel.config.run import CheckpointConfig, DataConfig, LoggingConfig
from moe_parallel.config.selection import (
    AutonomousSelection,
    Balancing,
    BiasBalancing,
    DispatchedSelection,
    FixedChoices,
    FixedNumber,
    FreeExperts,
    MergedSelection,
    RoutedSelection,
    Segments,
    Selection,
    TokensChoose,
    TopKChoices,
    aoe_wide_size,
    selection_of,
    selections,
)
from moe_parallel.config.training import OptimizerConfig, TrainingConfig

__all__ = [
    "AutonomousSelection",
    "Balancing",
    "BiasBalancing",
    "CheckpointConfig",
    "CommandLine",
    "Config",
    "DataConfig",
    "DispatchedSelection",
    "FixedChoices",
    "TopKChoices",
    "FixedNumber",
    "Fp8Config",
    "FreeExperts",
    "LoggingConfig",
    "MergedSelection",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RoutedSelection",
    "Segments",
    "Selection",
    "TokensChoose",
    "TrainingConfig",
    "aoe_wide_size",
    "make_config",
    "moe_layer_pattern",
    "parse_command_line",
    "read_command_line",
    "read_yaml",
    "selection_of",
    "selections",
    "validate",
    "validate_layer",
]
