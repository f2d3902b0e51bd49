"""Plans the runs of a study and checks that the comparison is fair."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from argparse import Namespace
from typing import Any

from run_cells import ROOT

from moe_parallel.analysis.study.contenders import (
    DENSE,
    Contender,
    SharedFile,
    choose_contenders,
)
from moe_parallel.analysis.study.design import SECTION, StudyDesign
from moe_parallel.analysis.study.folder import STUDY_MANIFEST, StudyFolder, StudyManifest
from moe_parallel.analysis.study.measures import student
from moe_parallel.analysis.study.report import MOST_TOTALS_DIFFER, parameter_table, total_difference
from moe_parallel.analysis.study.results import MEASURED, StudyResults
from moe_parallel.config import make_config, read_yaml, validate
from moe_parallel.config.message import flag
from moe_parallel.errors import InputError
from moe_parallel.tool import last_line

UNUSED_FOLDER = {"save": "unused"}  # checkpoint options need a folder; nothing is written to it
COUNT = ROOT / "tools" / "count_parameters.py"


def plan(options: Namespace, folder: StudyFolder) -> tuple[StudyManifest, dict[str, list[int]]]:
    """The complete study, including its earlier parts, and the seeds that this command requests, by
    contender.

    Raises InputError if something cannot be trained or cannot be compared.
    """
    raw = read_yaml(options.config)
    design = StudyDesign.from_raw(raw.pop(SECTION, None))
    if options.equal is not None:
        design = dataclasses.replace(design, equal=options.equal)
    if design.margin is not None:
        student()  # a missing package is reported before the first run, not after the last
    if not (words := options.selections or design.selections):
        raise InputError(
            f"--selections is not set: name systems, or give the section {SECTION} of --config "
            "a line selections"
        )
    file = SharedFile.from_raw(raw)
    chosen = choose_contenders(words, file, design.selections)
    contenders = {each.name: each for each in chosen}
    for contender in contenders.values():
        check_trainable(contender, options.nproc)
    first = next(iter(contenders.values())).config.training.seed
    seeds = {
        name: list(range(first, first + (options.seeds or design.seeds_for(name))))
        for name in contenders
    }
    design.check_seeds(max(seeds.values(), key=len))
    manifest = StudyManifest(contenders, seeds, options.nproc, options.threads, {}, design)
    earlier = folder.manifest()
    if earlier is not None:
        manifest = manifest.joined_to(earlier, file)
    _fit(manifest, options.nproc)
    return manifest, seeds


def _fit(manifest: StudyManifest, processes: int) -> None:
    """Make the contenders equal on the study's terms, and count their parameters."""
    counted: dict[str, dict[str, Any]] = {}

    def count(contender: Contender) -> dict[str, Any]:
        key = json.dumps([contender.name, contender.options], default=str)
        if key not in counted:
            counted[key] = count_parameters(contender)
        return counted[key]

    for name, contender in manifest.contenders.items():
        if name not in manifest.parameters:
            fitted = manifest.design.terms.fit(contender, manifest.reference, count)
            if fitted:
                manifest.fitted[name] = fitted
                check_trainable(manifest.settled(name), processes)
            manifest.parameters[name] = count(manifest.settled(name))


def check_totals(manifest: StudyManifest, allow_unequal: bool) -> None:
    """Print the table of parameters. Raises InputError if the comparison is not fair."""
    print(parameter_table(manifest.parameters))
    if manifest.design.terms.fits == "width":
        return
    totals = {
        name: counts["total"]
        for name, counts in manifest.parameters.items()
        if manifest.contenders[name].system != DENSE
    }
    if len(totals) < 2:
        return
    difference = total_difference(totals.values())
    least, most = min(totals, key=totals.__getitem__), max(totals, key=totals.__getitem__)
    print(f"total parameters differ by at most {difference:.2%}")
    if difference > MOST_TOTALS_DIFFER and not allow_unequal:
        raise InputError(
            f"{most} has {totals[most]:,} parameters and {least} {totals[least]:,}, "
            f"{difference:.1%} apart: give them equal sizes, or --allow-unequal"
        )


def count_active(manifest: StudyManifest, folder: StudyFolder) -> None:
    """Count the active parameters again, and save them, for contenders whose training has decided
    how many experts compute a token."""
    for result in StudyResults.read(folder).results:
        measured = result.spreads.get("experts_per_token")
        decided = result.parameters.get("active") is None or MEASURED in result.parameters
        if decided and measured is not None:
            counts = count_parameters(result.contender, measured.mean)
            manifest.parameters[result.name] = counts | {MEASURED: measured.mean}
    (folder.path / STUDY_MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def check_trainable(contender: Contender, processes: int) -> None:
    try:
        validate(make_config(contender.options | UNUSED_FOLDER), processes)
    except InputError as error:
        raise InputError(f"contender {contender.name}: {error}") from None


def count_parameters(
    contender: Contender, experts_per_token: float | None = None
) -> dict[str, Any]:
    """The parameters of the contender's model: total, active and active_compute. The last two are
    None if training decides how many experts compute a token and `experts_per_token` is None.

    The count runs in its own process. This process stays small, because the memory that a run
    inherits at its start counts as part of its peak memory.
    """
    command = [sys.executable, str(COUNT)]
    if experts_per_token is not None:
        command += ["--experts-per-token", str(experts_per_token)]
    for name, value in (contender.options | UNUSED_FOLDER).items():
        parts = value if isinstance(value, list) else [value]
        command += [flag(name), *("none" if part is None else str(part) for part in parts)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = last_line(done.stderr, "no reason given")
        raise InputError(f"contender {contender.name}: {reason.removeprefix(f'{COUNT.name}: ')}")
    return json.loads(done.stdout)
