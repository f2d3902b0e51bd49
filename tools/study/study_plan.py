"""Plans the runs of a study and checks that the comparison is fair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from typing import Any

from cell_runner import ROOT

from moe_parallel.analysis.study.contenders import (
    DENSE,
    Contender,
    SharedFile,
    choose_contenders,
    parse_overrides,
)
from moe_parallel.analysis.study.folder import MANIFEST, Cell, StudyFolder, StudyManifest
from moe_parallel.analysis.study.notes import MOST_TOTALS_DIFFER, total_difference
from moe_parallel.analysis.study.results import MEASURED, StudyResults
from moe_parallel.analysis.study.table import parameter_table
from moe_parallel.config import make_config, read_yaml, validate
from moe_parallel.config.message import flag
from moe_parallel.errors import InputError

UNUSED_FOLDER = {"save": "unused"}  # checkpoint options need a folder; nothing is written to it
COUNT = ROOT / "tools" / "count_parameters.py"


def plan(options: Namespace, folder: StudyFolder) -> tuple[StudyManifest, list[Cell]]:
    """The complete study, including its earlier parts, and the runs that this command requests.

    Raises InputError if something cannot be trained or cannot be compared.
    """
    raw = read_yaml(options.config)
    file, overrides = SharedFile.from_raw(raw), parse_overrides(options.override)
    contenders = {
        each.name: each for each in choose_contenders(options.selections, file, overrides)
    }
    for contender in contenders.values():
        check_trainable(contender, options.nproc)
    first = next(iter(contenders.values())).config.training.seed
    seeds = list(range(first, first + options.seeds))
    manifest = StudyManifest(contenders, seeds, options.nproc, options.threads, {})
    earlier = folder.manifest()
    if earlier is not None:
        manifest = manifest.joined_to(earlier, file)
    for name, contender in manifest.contenders.items():
        if name not in manifest.parameters:
            manifest.parameters[name] = count_parameters(contender)
    return manifest, list(folder.cells(list(contenders), seeds))


def check_totals(manifest: StudyManifest, allow_unequal: bool) -> None:
    """Print the table of parameters. Raises InputError if the comparison is not fair."""
    print(parameter_table(manifest.parameters))
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
            f"{difference:.1%} apart: give them equal sizes (--override), or --allow-unequal"
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
    (folder.path / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


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
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"contender {contender.name}: {reason.removeprefix(f'{COUNT.name}: ')}")
    return json.loads(done.stdout)


def check_trainable(contender: Contender, processes: int) -> None:
    try:
        validate(make_config(contender.options | UNUSED_FOLDER), processes)
    except InputError as error:
        raise InputError(f"contender {contender.name}: {error}") from None
    data = contender.config.data
    if data.vocab_size is None:
        raise InputError("--config has no vocab-size: give the size of the tokenizer, by which "
                         "parameters are counted")  # fmt: skip
