"""The names of clusters, and measured shares in place of published ones."""

import json
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import NODES, Efficiency, measured, parse_cluster


def test_a_cluster_is_nodes_of_a_kind() -> None:
    cluster = parse_cluster("h100x8:64")
    assert (cluster.nodes, cluster.ranks, cluster.node) == (64, 512, NODES["h100x8"])
    assert cluster.text == "64 nodes of h100x8, 512 GPUs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h101x8:4", "--cluster h101x8:4: 'h101x8' is no node; choose from a100x8, h100x8, "),
        ("h100x8", "--cluster h100x8: the number of nodes is missing or not from 1 to 100000"),
        ("h100x8:0", "not from 1 to 100000; write for example h100x8:8"),
        ("h100x8:-1", "not from 1 to 100000"),
        ("h100x8:100001", "not from 1 to 100000"),
    ],
)
def test_a_wrong_cluster_is_told(text: str, message: str) -> None:
    with pytest.raises(InputError) as told:
        parse_cluster(text)
    assert message in str(told.value)


def test_measured_shares_replace_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text('{"linear": 0.7, "network": 1}')
    assert measured(path, Efficiency()) == Efficiency(linear=0.7, network=1)


@pytest.mark.parametrize(
    "wrong", [{"linear": 0}, {"linear": 1.1}, {"liner": 0.5}, [], {"fp8": "1"}]
)
def test_wrong_shares_are_told(tmp_path: Path, wrong: object) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(InputError, match="^--measured"):
        measured(path, Efficiency())
    with pytest.raises(InputError, match="cannot be read as JSON"):
        measured(tmp_path / "none.json", Efficiency())
