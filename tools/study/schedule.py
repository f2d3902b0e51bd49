"""The order of the runs of a study: grids of pilot runs, further pilot runs, compared runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_parallel.analysis.study.folder import (
    STUDY_MANIFEST,
    Cell,
    StudyFolder,
    StudyManifest,
    Sweep,
    pilot_cells,
    read_sweep,
    tuned_options,
)
from moe_parallel.data.atomic_files import write_atomically

STAGES = ("grid", "further", "seeds")


@dataclass(frozen=True)
class Part:
    """Every `number`-th run of a stage, from the `first` one on."""

    first: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """`0/4`, the first of four parts."""
        if not (match := re.fullmatch(r"([0-9]+)/([1-9][0-9]*)", text)):
            raise argparse.ArgumentTypeError(f"{text} is not I/N, such as 0/4")
        first, number = int(match[1]), int(match[2])
        if first >= number:
            raise argparse.ArgumentTypeError(
                f"{text}: the parts are 0/{number} to {number - 1}/{number}"
            )
        return cls(first, number)

    def of(self, cells: list[Cell]) -> list[Cell]:
        return cells[self.first :: self.number]


class Schedule:
    """The runs that a command asks for, as they become known.

    A contender's further run is known when its grid is finished, and its compared runs when its
    pilot runs have decided their options. `seeds`: those of the compared runs, by contender.
    `stages`: those of STAGES to train. `part`: None, or the share of each stage.
    """

    def __init__(
        self,
        folder: StudyFolder,
        manifest: StudyManifest,
        seeds: Mapping[str, Sequence[int]],
        stages: Sequence[str] = STAGES,
        part: Part | None = None,
    ) -> None:
        self._folder, self._manifest = folder, manifest
        self._names, self._seeds, self._stages, self._part = list(seeds), seeds, stages, part
        self._factors = len(manifest.design.lr_grid)
        self._sweeps: dict[str, Sweep] = {}  # the finished ones
        self._over: set[Cell] = set()

    def known(self) -> list[Cell]:
        """The runs that are known now, in order, finished or not."""
        return [cell for stage in self._stages for cell in self._share(self._cells(stage))]

    def left(self) -> list[Cell]:
        """The known runs that are still to be trained."""
        for cell in self.known():
            if cell not in self._over and self._manifest.is_over(cell):
                self._over.add(cell)
        return [cell for cell in self.known() if cell not in self._over]

    def number_unknown(self) -> int:
        """The number of runs that are not known yet."""
        whole = {
            "grid": len(self._names) * self._factors,
            "further": len(self._names) if self._factors else 0,
            "seeds": sum(map(len, self._seeds.values())),
        }
        if self._part is not None:
            return 0
        return sum(whole[stage] - len(self._cells(stage)) for stage in self._stages)

    def undecided(self) -> list[str]:
        """The contenders of which a stage does not know its runs, though nothing is left."""
        missing = []
        for name in self._names:
            of_stage = {"grid": 0, "further": 1, "seeds": len(self._seeds[name])}
            for stage in self._stages:
                cells = [cell for cell in self._cells(stage) if cell.contender == name]
                if self._factors and len(cells) < of_stage[stage]:
                    missing.append(name)
        return list(dict.fromkeys(missing))

    def _share(self, cells: list[Cell]) -> list[Cell]:
        return cells if self._part is None else self._part.of(cells)

    def _cells(self, stage: str) -> list[Cell]:
        if stage == "seeds":
            return self._compared()
        if not self._factors:
            return []
        of_each = [self._pilots(name) for name in self._names]
        places = range(self._factors) if stage == "grid" else [self._factors]
        return [cells[place] for place in places for cells in of_each if place < len(cells)]

    def _pilots(self, name: str) -> list[Cell]:
        sweep = self._sweeps.get(name) or read_sweep(self._folder, self._manifest, name)
        if sweep.is_finished:
            self._sweeps[name] = sweep
        return pilot_cells(self._folder, self._manifest, name, sweep)

    def _compared(self) -> list[Cell]:
        seeds = self._seeds
        if self._factors:
            seeds = {name: its for name, its in seeds.items() if self._is_decided(name)}
        return list(self._folder.cells(seeds))

    def _is_decided(self, name: str) -> bool:
        """Whether the options of the compared runs are known. They are recorded, and never change
        again."""
        tuned = self._manifest.tuned
        if name not in tuned:
            options = tuned_options(self._folder, self._manifest, name)
            if options is None:
                return False
            tuned[name] = options
            write_atomically(self._folder.path / STUDY_MANIFEST, self._manifest.to_json())
        return True
