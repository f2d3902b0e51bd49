"""The configuration of a run: the command line over a file or over the checkpoint of --load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_parallel.config import CommandLine, Config, read_command_line, read_yaml
from moe_parallel.errors import Damaged, InputError
from moe_parallel.training.checkpoint.folder import CheckpointFolder, find_checkpoint
from moe_parallel.training.checkpoint.record import checked_file, read_record


@dataclass(frozen=True)
class RunConfig:
    """A configuration, and the warnings about how it was derived."""

    config: Config
    warnings: tuple[str, ...] = ()


def run_config(arguments: Sequence[str]) -> RunConfig:
    """The configuration that a command line specifies.

    Flags override the file of --config. Without --config, `--load` provides the configuration that
    its checkpoint was saved with, and the run continues in the folder that contains the checkpoint
    now.

    Prints help and raises SystemExit(0) for --help. Raises InputError for invalid input.
    """
    line = read_command_line(arguments)
    load = line.given.get("load", "none")
    if line.file is not None:
        config, warnings = line.over(read_yaml(line.file), f"--config {line.file}")
    elif load == "none" or begins_in(load, line.given.get("save")):
        config, warnings = line.over({}, "")
    else:
        config, warnings = _of_checkpoint(line, load)
    if config.training.skip_train:
        if "save" not in line.given:  # what a file says about checkpoints is about training
            nothing_saved = replace(
                config.checkpoint, save=None, save_interval=None, keep_last=None, async_save=False
            )
            config = replace(config, checkpoint=nothing_saved)
    elif config.checkpoint.save is None:
        warnings.append("--save is not set: neither checkpoints nor metrics will be written")
    return RunConfig(config, tuple(warnings))


def begins_in(load: str | None, save: str | None) -> bool:
    """Whether --load is --save, and the folder has no checkpoint yet.

    The same command then starts a run and continues it, so a batch system can repeat the command
    whenever the run was killed. Raises InputError if the folder is damaged.
    """
    if load is None or save is None or Path(load).resolve() != Path(save).resolve():
        return False
    folder = CheckpointFolder(Path(load))
    return not folder.newest_first() and folder.latest() is None


def _of_checkpoint(line: CommandLine, load: str) -> tuple[Config, list[str]]:
    checkpoint, file = _newest_file(load)
    # The saved `save` and `load` are ignored: the folder may have moved since.
    file = {name: value for name, value in file.items() if name not in ("load", "save")}
    config, warnings = line.over(file, f"{checkpoint}/config.yaml")
    begins_another = config.checkpoint.finetune or "moe_use_upcycling" in line.given
    if not ("save" in line.given or begins_another):
        folder = _folder_of(checkpoint, load)
        config = replace(config, checkpoint=replace(config.checkpoint, save=str(folder)))
    return config, warnings


def _newest_file(load: str) -> tuple[Path, dict[str, object]]:
    """The checkpoint that --load names, or the newest with a configuration, and its content.

    All files of the checkpoint are checked later, by all ranks: see `record.newest_good`.
    """
    folder = Path(load)
    candidates = CheckpointFolder(folder).newest_first() or [find_checkpoint(folder)]
    first: Damaged | None = None
    for checkpoint in candidates:
        try:
            if "config.yaml" in read_record(checkpoint)["files"]:
                return candidates[0], read_yaml(checked_file(checkpoint, "config.yaml"))
        except Damaged as error:
            first = first or error
    raise first or InputError(f"--load {load}: it has no config.yaml: give a file with --config")


def _folder_of(checkpoint: Path, load: str) -> Path:
    """The run folder that contains a checkpoint."""
    if checkpoint != Path(load):
        return Path(load)
    if not checkpoint.name.startswith("iter_"):
        checkpoint = checkpoint.resolve()
    if not checkpoint.name.startswith("iter_"):
        raise InputError(f"--load {load} is not in a run folder: give a folder with --save")
    return checkpoint.parent
