"""Weights & Biases, if it is installed and requested."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import read_word
from moe_parallel.telemetry.metrics import MetricsLine, untimed
from moe_parallel.telemetry.scalars import histograms, scalars

RUN_ID_FILE = "wandb_run_id.txt"


class WandbSink:
    """Logs `scalars` and `histograms` of every record to one W&B run, under `directory`/wandb.

    The id of the run is stored in `directory`/wandb_run_id.txt, so that a resumed run continues the
    same curves. The x axis is `iteration`, because W&B's own step cannot go back to a checkpoint.
    W&B cannot take a value back either, so values that were sent before are not sent again.
    """

    def __init__(
        self,
        directory: Path | str,
        project: str,
        mode: str,
        told: Sequence[MetricsLine] | None,
        config: dict[str, Any],
    ) -> None:
        """`mode`: online, offline (upload later with `wandb sync`) or disabled.

        `told`: for a run that continues, the records after the checkpoint, which it will produce
        again; None: a new run. Raises InputError if wandb is not installed or refuses to start.
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
                settings=wandb.Settings(silent=True),  # its messages would disturb the progress bar
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"--wandb-mode {mode}: wandb did not start ({reason}): "
                "run `wandb login`, or use --wandb-mode offline"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, record: MetricsLine) -> None:
        """Raises OSError for every error of wandb."""
        if untimed(record) in self._told:
            return
        values = {name: self._wandb.Histogram(of) for name, of in histograms(record).items()}
        with _as_oserror():
            self._run.log({"iteration": record["iteration"], **scalars(record), **values})

    def sync(self) -> None:
        """Does nothing: wandb's separate process decides when to write."""

    def close(self) -> None:
        with _as_oserror():
            self._run.finish()


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """Convert any error to an OSError; the errors of wandb's process have no common type."""
    try:
        yield
    except Exception as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from error


def _run_id(path: Path, *, resumed: bool) -> str:
    known = read_word(path) if resumed and path.exists() else ""
    if known:  # a full disk may have left the file empty
        return known
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id
