"""The files in examples/ are valid on the ranks that they name; the recipes match the papers."""

import functools
import re
from pathlib import Path

import pytest
import yaml

from moe_parallel.config import Config, make_config, parse_command_line, validate
from moe_parallel.systems import SELECTIONS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Studies are not configurations of a run: they contain options of several systems.
STUDIES = {EXAMPLES / "study.yaml", *(EXAMPLES / "studies").glob("*.yaml")}
TASKS = set((EXAMPLES / "tasks").rglob("*.yaml"))  # of the harness
FILES = sorted(set(EXAMPLES.rglob("*.yaml")) - STUDIES - TASKS)
PAPERS = [path for path in FILES if path.is_relative_to(EXAMPLES / "papers")]
SYSTEMS = [path for path in FILES if path.is_relative_to(EXAMPLES / "systems")]
AOE = [path for path in PAPERS if path.parent.name == "aoe"]


def name_of(path: Path) -> str:
    return str(path.relative_to(EXAMPLES).with_suffix(""))


@functools.cache
def read(path: Path) -> Config:
    return parse_command_line(["--config", str(path)])


def started_ranks(path: Path) -> int:
    """The number of ranks that the file's own torchrun line starts with this file."""
    text = path.read_text()
    assert f"--config {path.relative_to(EXAMPLES.parent)}\n" in text
    (per_node,) = re.findall(r"--nproc-per-node (\d+)", text)
    nodes = re.findall(r"--nnodes (\d+)", text) or ["1"]
    return int(nodes[0]) * int(per_node)


def settings(path: Path) -> dict[str, str]:
    """The blocks of a file by their headings, without comments."""
    blocks: dict[str, str] = {}
    for block in path.read_text().split("\n\n")[1:]:
        heading = re.match(r"# (\w+)", block)
        assert heading is not None, block
        lines = [line.partition("#")[0].strip() for line in block.splitlines()]
        blocks[heading[1]] = "\n".join(line for line in lines if line)
    return blocks


@pytest.mark.parametrize("path", [*PAPERS, *SYSTEMS], ids=name_of)
def test_valid_on_the_ranks_that_it_starts(path: Path) -> None:
    validate(read(path), started_ranks(path))
    validate(read(EXAMPLES / "quickstart.yaml"), 2)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_reads_back_what_it_writes(path: Path) -> None:
    config = read(path)
    written = yaml.safe_load(config.to_yaml())
    assert make_config({name.replace("-", "_"): value for name, value in written.items()}) == config


# One file per system


@pytest.mark.parametrize("system", SELECTIONS)
def test_every_system_has_an_example(system: str) -> None:
    config = read(EXAMPLES / "systems" / f"{system}.yaml")
    assert config.selection.system == system


@pytest.mark.parametrize("path", SYSTEMS, ids=name_of)
def test_examples_of_systems_differ_in_experts_and_layout_alone(path: Path) -> None:
    def shared(path: Path) -> dict[str, str]:
        blocks = settings(path)
        blocks["run"] = blocks["run"].replace(f"runs/{path.stem}", "runs/SYSTEM")
        return {name: blocks[name] for name in ("model", "training", "run")}

    assert set(settings(path)) == {"model", "experts", "layout", "training", "run"}
    assert shared(path) == shared(SYSTEMS[0])


# The papers


@pytest.mark.parametrize("path", PAPERS, ids=name_of)
def test_every_number_of_a_papers_model_and_training_says_where_it_is_from(path: Path) -> None:
    for block in re.split(r"\n\n", path.read_text())[1:]:
        lines = block.splitlines()
        if re.match(r"# (model|experts|batch|optimizer)", block):
            for line in lines[1:]:
                assert re.search(r"  # \[(paper|ours)\]", line), line


@pytest.mark.parametrize("path", AOE, ids=name_of)
def test_the_model_is_that_of_the_aoe_paper(path: Path) -> None:
    config = read(path)
    model, large = config.model, path.stem.endswith("4b")
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size)
    assert shape == ((24, 1280, 20, 5120) if large else (12, 768, 12, 3072))
    assert config.moe.num_experts == 8
    if path.stem.startswith("aoe"):
        assert config.selection.aoe_up_init_method == "normal"
    widths = {"moe_732m": 3072, "moe_4b": 5120, "aoe_732m": 3840, "aoe_4b": 6470}
    assert config.expert_width == widths[re.sub("_(top_p|expert_choice)", "", path.stem)]


@pytest.mark.parametrize("size", ["732m", "732m_top_p", "732m_expert_choice", "4b"])
def test_moe_and_aoe_differ_in_the_selection_alone(size: str) -> None:
    def other_lines(name: str) -> set[str]:
        lines = (EXAMPLES / f"papers/aoe/{name}.yaml").read_text().splitlines()
        own = ("expert-selection", "moe-z-loss", "aoe-", "save", "#")
        return {line.partition("#")[0].strip() for line in lines if not line.startswith(own)}

    assert other_lines(f"moe_{size}") == other_lines(f"aoe_{size}")
