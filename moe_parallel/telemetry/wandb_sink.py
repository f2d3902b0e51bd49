"""Weights & Biases, where it is installed and asked for."""

from __future__ import annotations

import importlib
import secrets
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.telemetry.metrics import Record
from moe_parallel.telemetry.scalars import scalars

RUN_ID_FILE = "wandb_run_id.txt"


class WandbSink:
    """Logs `scalars` of every record to one W&B run, kept under `directory`/wandb.

    The id of the run is kept in `directory`/wandb_run_id.txt, so that a resumed run goes on in the
    same curves. The x axis is `iteration`: W&B's own step cannot go back to a checkpoint.
    """

    def __init__(
        self,
        directory: Path | str,
        project: str,
        mode: str,
        resumed: bool,
        config: dict[str, Any],
    ) -> None:
        """`mode`: online, offline (upload later with `wandb sync`) or disabled.

        Raises InputError where wandb is not installed or refuses to start.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            raise InputError(
                f"--wandb-project {project}: wandb is not installed: "
                "pip install wandb, or leave the flag out"
            ) from error
        directory = Path(directory)
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                dir=str(directory),
                mode=mode,
                id=_run_id(directory / RUN_ID_FILE, resumed),
                resume="allow",
                config=config,
                settings=wandb.Settings(silent=True),  # it would write into the progress bar
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"--wandb-mode {mode}: wandb did not start ({reason}): "
                "run `wandb login`, or use --wandb-mode offline"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, record: Record) -> None:
        self._run.log({"iteration": record["iteration"], **scalars(record)})

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path, resumed: bool) -> str:
    if resumed and path.exists():
        return path.read_text().strip()
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id
