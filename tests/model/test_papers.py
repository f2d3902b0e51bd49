"""The papers' models in examples/papers, built without storage and counted.

The counts are compared with the sums that follow from each section of the papers and with the
table in docs/papers.md, to the digits that are written there.

The AoE paper's "732M with 247M active" is not one model: 732M is the total with tied embeddings,
and 247M the active count with untied ones (for AoE, without the down-projections of other
experts). Its 4B and 1.18B, and the dense 374M and 570M of the other papers, have untied embeddings.
"""

import re
import shlex
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import Config, ParallelConfig, parse_command_line, validate
from moe_parallel.model.parameters import count_parameters
from moe_parallel.parallel import destroy_groups, initialize_groups
from tests.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ROOT / "examples" / "papers"
UNTIED = "--untie-embeddings-and-output-weights"

Count = tuple[int, int | None, int | None]  # total, active, active with every W_down

#: By file and flags that docs/papers.md does not list: total, active, active with every W_down.
EXPECTED: dict[str, tuple[str, str | None, str | None]] = {
    f"aoe/moe_732m.yaml {UNTIED}": ("757.03M", "247.43M", "247.43M"),
    f"aoe/aoe_732m.yaml --aoe-low-rank-size 64 {UNTIED}": ("757M", "247M", "251M"),
    f"aoe/aoe_732m.yaml --aoe-low-rank-size 128 {UNTIED}": ("757M", "247M", "254M"),
    f"aoe/aoe_732m.yaml {UNTIED}": ("757M", "247M", "262M"),
    f"aoe/aoe_732m.yaml --aoe-low-rank-size 512 {UNTIED}": ("757M", "247M", "276M"),
    f"aoe/moe_732m_expert_choice.yaml {UNTIED}": ("757M", "247M", "247M"),
    f"aoe/aoe_732m_expert_choice.yaml {UNTIED}": ("757M", "247M", "262M"),
    "lory/lory_0.3b.yaml --expert-selection lory_prefix": ("1.827B", "0.374B", "0.374B"),
    "lory/expert_choice_0.3b.yaml --expert-selection segment_expert_choice": (
        "1.827B",
        "0.374B",
        "0.374B",
    ),
    "lory/lory_1.5b.yaml --num-experts 16": ("15.05B", "1.46B", "1.46B"),
    "lory/lory_1.5b.yaml --num-experts 32": ("29.54B", "1.46B", "1.46B"),
}


class Row(NamedTuple):
    """A row of docs/papers.md: name | command | ranks | total | active | every W_down | paper"""

    command: str
    ranks: int
    total: str
    active: str
    active_compute: str


def documented() -> list[Row]:
    rows = re.findall(
        r"^\|[^|]*\| `([^`|]+\.yaml[^`|]*)` \| (\d+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|",
        (ROOT / "docs" / "papers.md").read_text(),
        re.MULTILINE,
    )
    return [Row(command, int(ranks), *counts) for command, ranks, *counts in rows]


DOCUMENTED = documented()


def config_of(command: str) -> Config:
    file, *flags = shlex.split(command)
    return parse_command_line(["--config", str(PAPERS / file), *flags])


def count_all(commands: list[str], experts_per_token: float | None = None) -> dict[str, Count]:
    groups = initialize_groups(ParallelConfig())
    model_parallel_cuda_manual_seed(1)
    counts: dict[str, Count] = {}
    for command in commands:
        config = replace(config_of(command), parallel=ParallelConfig())
        assert config.data.vocab_size is not None
        found = count_parameters(config, config.data.vocab_size, groups, experts_per_token)
        counts[command] = astuple(found)
    destroy_groups()
    return counts


@pytest.fixture(scope="module")
def counts() -> dict[str, Count]:
    commands = {*EXPECTED, *(row.command for row in DOCUMENTED)}
    return run_distributed(1, count_all, sorted(commands))[0]


def written_like(example: str, parameters: int | None) -> str | None:
    """`parameters` with the unit and the digits of `example`: 732.46M, 6.81B."""
    if parameters is None:
        return None
    digits, unit = len(example[:-1].partition(".")[2]), {"M": 1e6, "B": 1e9}[example[-1]]
    return f"{parameters / unit:.{digits}f}{example[-1]}"


@pytest.mark.parametrize("command", EXPECTED)
def test_parameters_are_those_of_the_paper(counts: dict[str, Count], command: str) -> None:
    for parameters, expected in zip(counts[command], EXPECTED[command], strict=True):
        assert written_like(expected or "0M", parameters) == expected


@pytest.mark.parametrize("low", [64, 128, 256, 512])
def test_every_d_low_gives_the_total_of_moe(counts: dict[str, Count], low: int) -> None:
    """Except for the routers that AoE lacks, and the rounding of Eq. 5: half a column in each of
    the three wide matrices of an expert."""
    flags = "" if low == 256 else f" --aoe-low-rank-size {low}"
    without_routers = counts["aoe/moe_732m.yaml"][0] - 12 * 8 * 768
    rounding = 12 * 8 * (low + 2 * 768) / 2
    assert abs(counts[f"aoe/aoe_732m.yaml{flags}"][0] - without_routers) <= rounding


# docs/papers.md


def test_every_file_is_documented() -> None:
    files = {str(path.relative_to(PAPERS)) for path in PAPERS.rglob("*.yaml")}
    assert {row.command for row in DOCUMENTED} >= files


@pytest.mark.parametrize("row", DOCUMENTED, ids=lambda row: row.command)
def test_documented_counts(counts: dict[str, Count], row: Row) -> None:
    total, active, active_compute = counts[row.command]
    assert written_like(row.total, total) == row.total
    if row.active == "by token":
        assert (active, active_compute, row.active_compute) == (None, None, "by token")
    else:
        assert written_like(row.active, active) == row.active
        assert written_like(row.active_compute, active_compute) == row.active_compute


@pytest.mark.parametrize("row", DOCUMENTED, ids=lambda row: row.command)
def test_documented_commands_are_valid_on_their_ranks(row: Row) -> None:
    text = (PAPERS / row.command.split()[0]).read_text()
    assert f"# Ranks: {row.ranks}." in text
    validate(config_of(row.command), row.ranks)
