"""The names of clusters, and measured shares in place of published ones."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import (
    NODES,
    Cluster,
    Efficiency,
    measured,
    one_node,
    parse_cluster,
)


def test_a_cluster_is_nodes_of_a_kind() -> None:
    cluster = parse_cluster("h100x8:64")
    assert (cluster.nodes, cluster.ranks, cluster.node) == (64, 512, NODES["h100x8"])
    assert cluster.text == "64 nodes of h100x8, 512 GPUs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h101x8:4", "--cluster h101x8:4: 'h101x8' is not known; choose from a100x8, h100x8, "),
        ("h100x8", "--cluster h100x8: the number of nodes is missing or not from 1 to 100000"),
        ("h100x8:0", "not from 1 to 100000; write for example h100x8:8"),
        ("h100x8:100001", "not from 1 to 100000"),
    ],
)
def test_a_wrong_cluster_is_told(text: str, message: str) -> None:
    with pytest.raises(InputError) as told:
        parse_cluster(text)
    assert message in str(told.value)


def test_one_node_is_known_or_described(tmp_path: Path) -> None:
    assert one_node("h200x8") == Cluster(NODES["h200x8"], 1)
    path = tmp_path / "node.json"
    path.write_text(json.dumps(asdict(NODES["a100x8"]) | {"efficiency": {"linear": 1.0}}))
    assert one_node(str(path)) == Cluster(NODES["a100x8"], 1, Efficiency(linear=1.0))


@pytest.mark.parametrize(
    "content", [None, "[]", '{"name": "small"}', '{"efficiency": {"liner": 1}}']
)
def test_a_node_that_is_not_described_is_told(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "node.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=f"^--node {path}: it is neither one of a100x8, .* nor a"):
        one_node(str(path))


def test_measured_seconds_are_of_the_node(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text('{"linear": 0.7, "call_time": 2.8e-5, "kernel_time": 0}')
    found = measured(path, Cluster(NODES["h100x8"], 2))
    node = replace(NODES["h100x8"], call_time=2.8e-5, kernel_time=0)
    assert found == Cluster(node, 2, Efficiency(linear=0.7))


@pytest.mark.parametrize(
    "wrong",
    [
        {"linear": 1.1},
        {"liner": 0.5},
        [],
        {"fp8": "1"},
        {"kernel_time": -1e-6},
    ],
)
def test_wrong_shares_are_told(tmp_path: Path, wrong: object) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(InputError, match="^--measured"):
        measured(path, Cluster(NODES["h100x8"], 1))
    with pytest.raises(InputError, match="cannot be read as JSON"):
        measured(tmp_path / "none.json", Cluster(NODES["h100x8"], 1))
