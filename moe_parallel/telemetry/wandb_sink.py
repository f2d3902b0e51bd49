"""Weights & Biases, where it is installed and asked for."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.telemetry.metrics import Record, untimed
from moe_parallel.telemetry.scalars import histograms, scalars

RUN_ID_FILE = "wandb_run_id.txt"


class WandbSink:
    """Logs `scalars` and `histograms` of every record to one W&B run, under `directory`/wandb.

    The id of the run is kept in `directory`/wandb_run_id.txt, so that a resumed run goes on in the
    same curves. The x axis is `iteration`: W&B's own step cannot go back to a checkpoint. Nor can
    it take a value back, so what it was told before is not told again.
    """

    def __init__(
        self,
        directory: Path | str,
        project: str,
        mode: str,
        told: Sequence[Record] | None,
        config: dict[str, Any],
    ) -> None:
        """`mode`: online, offline (upload later with `wandb sync`) or disabled.

        `told`: of a run that goes on, the records after the checkpoint, which it will make once
        more; None: a new run. Raises InputError where wandb is not installed or refuses to start.
        """
        wandb = import_optional("wandb", f"--wandb-project {project}")
        directory = Path(directory)
        self.name = str(directory / "wandb")
        self._wandb = wandb
        self._told = [untimed(record) for record in told or ()]
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                dir=str(directory),
                mode=mode,
                id=_run_id(directory / RUN_ID_FILE, resumed=told is not None),
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
        """Raises OSError, whatever wandb raised."""
        if untimed(record) in self._told:
            return
        values = {name: self._wandb.Histogram(of) for name, of in histograms(record).items()}
        with _as_oserror():
            self._run.log({"iteration": record["iteration"], **scalars(record), **values})

    def sync(self) -> None:
        """wandb has a process of its own, which writes when it sees fit."""

    def close(self) -> None:
        with _as_oserror():
            self._run.finish()


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """A log that fails; wandb has no common type for what its own process meets."""
    try:
        yield
    except Exception as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from error


def _run_id(path: Path, *, resumed: bool) -> str:
    known = path.read_text().strip() if resumed and path.exists() else ""
    if known:  # not where a full disk left the file empty
        return known
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id
