"""Jobs that the scripts of examples/slurm submit, and the undisturbed run to compare them with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moe_parallel.telemetry.metrics import TIMING
from tests.cluster.slurm import Cluster
from tests.program import (
    EVERY_2,
    LAST,
    SMALL,
    Options,
    Program,
    flags,
    same_bytes,
    small_data,
    stored_tensors,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"


class Undisturbed:
    """The data, and the result of a run of two ranks without Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = small_data(folder)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        run = self.folder / "run"
        with Program(self.folder, 2, flags(SMALL | self.data | EVERY_2 | {"save": run})) as job:
            assert job.finish(600) == 0, job.output
        return last_tensors(run)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        assert self.tensors
        return records(self.folder / "run")


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the run's last checkpoint."""
    return stored_tensors(run / f"iter_{LAST:07d}")


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what differs between equal runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{name: line[name] for name in line if name not in TIMING} for line in lines]


class SlurmJob:
    """A job of a script in examples/slurm, whose run is in `folder`/run."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        options: Options,
        *,
        script: str = "pretrain.sbatch",
        slurm: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        ranks_per_node: int = 1,
        when_idle: bool = True,
        run: Path | None = None,
    ) -> None:
        """
        Args:
            options: the flags of the program that the script starts.
            slurm: sbatch's flags, which override those in the script.
            variables: what the user has exported.
            when_idle: first wait until all nodes are idle.
            run: the script's first word, in place of `folder`/run.
        """
        self.cluster = cluster
        self.folder = folder
        self.run = run or folder / "run"
        self.output_file = folder / "job.out"
        self._words = (
            *("--chdir", str(EXAMPLES.parents[1]), "--output", str(self.output_file), *slurm),
            *(str(EXAMPLES / script), str(self.run)),
            *flags(options),
        )
        self._variables = {
            "RANKS_PER_NODE": str(ranks_per_node),
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }
        cluster.outputs.append(self.output_file)
        self.submit(when_idle=when_idle)

    def submit(self, *, when_idle: bool = True) -> None:
        """Submit the same command, for the first time or again."""
        if when_idle:
            self.cluster.wait_for_nodes()
        self.id = self.cluster.sbatch(*self._words, env=self._variables)

    @property
    def output(self) -> str:
        """What the job has printed, without the numbers of ranks before their lines."""
        if not self.output_file.exists():
            return ""
        text = self.output_file.read_text(errors="replace")
        return re.sub(r"(?m)^ *\d+: ", "", text)

    def go_on(self) -> None:
        """End the pause of a rank; see tests/launch/disturbed.py."""
        (self.folder / "go_on").touch()

    @property
    def left_its_pause(self) -> str:
        """Why a rank ended its pause; empty: it has not, or never paused."""
        left = self.folder / "left"
        return left.read_text() if left.exists() else ""

    @property
    def restarts(self) -> int:
        """How often Slurm has started the job again."""
        return int(self.cluster.facts(self.id)["Restarts"])

    @property
    def exit_code(self) -> int:
        return int(self.cluster.facts(self.id)["ExitCode"].split(":")[0])

    def wait_for_output(self, text: str, timeout: float = 120) -> None:
        self.cluster.wait_until(lambda: text in self.output, timeout, f"{text!r} is printed")

    def complete(self, timeout: float = 240) -> None:
        """Wait until the job is complete; a requeued job starts again at once."""
        deadline = self.cluster.deadline(timeout)
        while (state := self.cluster.state(self.id)) != "COMPLETED":
            deadline(f"job {self.id} is complete")
            if state == "PENDING" and self.restarts:
                self.cluster.start_now(self.id)
            assert state not in ("FAILED", "TIMEOUT", "CANCELLED"), f"{state}\n{self.output}"

    def ended(self) -> bool:
        """Whether neither the job nor a task of its array runs or waits."""
        return not self.cluster.ask("squeue", "--noheader", "--jobs", str(self.id)).strip()

    def check_whole(self, undisturbed: Undisturbed) -> None:
        """The tensors have the same bytes, and the records are the same."""
        assert same_bytes(last_tensors(self.run), undisturbed.tensors)
        assert records(self.run) == undisturbed.records

    def check_published(self) -> None:
        """Every checkpoint that has a checkpoint's name can be read."""
        for checkpoint in self.run.glob("iter_*"):
            assert stored_tensors(checkpoint)
