"""Conversions on the ranks of a test, as tools/convert.py does them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from moe_parallel.config import Config, ParallelConfig, parse_command_line
from moe_parallel.convert.configuration import converted_config
from moe_parallel.convert.conversion import Conversion, convert
from moe_parallel.parallel import Groups, destroy_groups, initialize_groups
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.standalone import standalone_config
from tests.program import Options, flags


@contextmanager
def groups_of_one() -> Iterator[Groups]:
    """Groups on a world of one rank."""
    groups = initialize_groups(ParallelConfig())
    model_parallel_cuda_manual_seed(1)
    try:
        yield groups
    finally:
        destroy_groups()


def config_of(run: Path) -> Config:
    """The configuration with which a run was trained."""
    return parse_command_line(["--config", str(find_checkpoint(run) / "config.yaml")])


def convert_here(
    load: Path, save: Path, to: str, options: Options, rank: int | None = None, samples: int = 24
) -> Conversion:
    """Convert on a world of one rank. `rank`: of W_g; None: copy the weights."""
    target = converted_config(config_of(load), to, str(save), flags(options))
    with groups_of_one() as groups:
        return convert(
            standalone_config([], load=str(load)), target, groups, rank, samples, lambda _: None
        )
