"""The configuration: frozen dataclasses, from which YAML keys, flags and help are generated."""

from moe_parallel.config.command_line import (
    CommandLine,
    parse_command_line,
    read_command_line,
)
from moe_parallel.config.config import Config, make_config
from moe_parallel.config.fp8 import Fp8Config
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
    AoEExpertChoiceSelection,
    AoESelection,
    AoETopPSelection,
    AutonomousSelection,
    ExpertChoiceSelection,
    LoryPrefixSelection,
    LorySelection,
    MergedSelection,
    RoutedSelection,
    SegmentExpertChoiceSelection,
    Selection,
    SmearSelection,
    TopKSelection,
    TopPSelection,
    aoe_wide_size,
    selection_name,
)
from moe_parallel.config.selection.parts import (
    Balancing,
    BiasBalancing,
    DispatchedSelection,
    DynamicChoices,
    ExpertsChoose,
    FixedChoices,
)
from moe_parallel.config.validate import data_parallel_size, validate, validate_layer
from moe_parallel.config.yaml_file import read_yaml

__all__ = [
    "SELECTIONS",
    "Balancing",
    "BiasBalancing",
    "DispatchedSelection",
    "DynamicChoices",
    "ExpertsChoose",
    "FixedChoices",
    "AoEExpertChoiceSelection",
    "AoESelection",
    "AoETopPSelection",
    "AutonomousSelection",
    "CheckpointConfig",
    "CommandLine",
    "Config",
    "DataConfig",
    "ExpertChoiceSelection",
    "Fp8Config",
    "LoggingConfig",
    "LoryPrefixSelection",
    "LorySelection",
    "MergedSelection",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RoutedSelection",
    "SegmentExpertChoiceSelection",
    "Selection",
    "SmearSelection",
    "TopKSelection",
    "TopPSelection",
    "TrainingConfig",
    "aoe_wide_size",
    "data_parallel_size",
    "make_config",
    "moe_layer_pattern",
    "parse_command_line",
    "read_command_line",
    "read_yaml",
    "selection_name",
    "validate",
    "validate_layer",
]
