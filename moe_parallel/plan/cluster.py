"""Descriptions of clusters: published figures of GPUs, links and kernels, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from moe_parallel.config.message import counted
from moe_parallel.errors import InputError
from moe_parallel.reading import parse_json, read_small

#: Of a GPU's memory, for CUDA, NCCL's buffers and fragmentation; an assumption.
RESERVE = 6 * 2**30


@dataclass(frozen=True)
class Efficiency:
    """The share of a peak that kernels reach. A plan without other measurements uses these.

    Five are published figures; `linear` and `memory` were measured by this project on an H200.
    Those of products are for large ones.

    linear: 770 to 800 of 989 TFLOP/s, a large bf16 product on H200 (measured).
    experts: 597 of 989 TFLOP/s, a fused expert layer of width 2048 on H100 (SonicMoE, arXiv
        2512.14080), over the share 0.93 of a product with k = 2048.
    fp8: 1381 of 1979 TFLOP/s forward and for dx, 813 to 873 for dw (DeepGEMM, its README), over the
        share 0.96 of a product with k = 7168.
    attention: about half of the peak, causal, head width 128, sequences of 4,096, forward and
        backward together (FlashAttention-3, arXiv 2407.08608, figures 5 and 6).
    memory: 4.3 of 4.8 TB/s, a copy on H200 (measured).
    node, network: 158 of 160 and 43 of 50 GB/s, all-to-all by DeepEP on H800 (its README); for
        node, 0.8 instead, because its links are 450 GB/s on H100, where no such figure is known.
    """

    linear: float = 0.79
    experts: float = 0.65
    fp8: float = 0.60
    attention: float = 0.50
    memory: float = 0.90
    node: float = 0.80
    network: float = 0.86


@dataclass(frozen=True)
class Node:
    """A kind of node. FLOP/s are dense (without sparsity); links count one direction."""

    name: str
    gpus: int
    bf16: float  # FLOP/s
    fp8: float | None  # FLOP/s; None: no such instructions
    fp32: float  # FLOP/s; not on tensor cores: torch does not round to TF32 unless it is told
    memory_size: float  # bytes of a GPU
    memory_rate: float  # bytes/s
    link_rate: float  # bytes/s of a GPU to those of its node
    network_rate: float  # bytes/s of a GPU to other nodes
    processors: int  # multiprocessors of a GPU
    source: str
    link_latency: float = 10e-6  # seconds of a small collective of NCCL in a node; an assumption
    network_latency: float = 25e-6  # the same between nodes
    call_time: float = 10e-6  # of the host, for a call that launches a kernel; an assumption
    # What a kernel takes besides its FLOPs or its traffic. Not known without a measurement.
    kernel_time: float = 0.0


NODES = {
    node.name: node
    for node in (
        Node(
            "a100x8", 8, 312e12, None, 19.5e12, 80e9, 2.039e12, 300e9, 25e9, 108,
            "NVIDIA A100 80GB SXM and DGX A100 data sheets (200 Gb/s a GPU)",
        ),
        Node(
            "h100x8", 8, 989e12, 1979e12, 67e12, 80e9, 3.35e12, 450e9, 50e9, 132,
            "NVIDIA H100 SXM and DGX H100 data sheets (400 Gb/s a GPU)",
        ),
        Node(
            "h200x8", 8, 989e12, 1979e12, 67e12, 141e9, 4.8e12, 450e9, 50e9, 132,
            "NVIDIA H200 SXM and DGX H200 data sheets (400 Gb/s a GPU)",
        ),
        Node(
            "b200x8", 8, 2250e12, 4500e12, 75e12, 180e9, 8.0e12, 900e9, 50e9, 148,
            "NVIDIA DGX B200 data sheet (400 Gb/s a GPU)",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind, all of whose GPUs train."""

    node: Node
    nodes: int
    efficiency: Efficiency = Efficiency()

    @property
    def ranks(self) -> int:
        return self.node.gpus * self.nodes

    @property
    def text(self) -> str:
        return f"{counted(self.nodes, 'node')} of {self.node.name}, {counted(self.ranks, 'GPU')}"


def parse_cluster(text: str) -> Cluster:
    """`h100x8:64` is 64 nodes of 8 H100 GPUs. Raises InputError."""
    name, _, count = text.partition(":")
    if name not in NODES:
        raise InputError(f"--cluster {text}: {name!r} is not known; choose from {', '.join(NODES)}")
    if not (count.isascii() and count.isdecimal()) or not 1 <= int(count) <= 100_000:
        raise InputError(
            f"--cluster {text}: the number of nodes is missing or not from 1 to 100000; write for "
            f"example {name}:8 for 8 nodes"
        )
    return Cluster(NODES[name], int(count))


def one_node(text: str) -> Cluster:
    """A known kind of node by its name, or the node that a JSON file describes.

    The file has the fields of `Node` and, under `efficiency`, those of `Efficiency`. Raises
    InputError.
    """
    if text in NODES:
        return Cluster(NODES[text], 1)
    try:
        described = parse_json(read_small(Path(text)))
        efficiency = Efficiency(**described.pop("efficiency", {}))
        return Cluster(Node(**described), 1, efficiency)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"--node {text}: it is neither one of {', '.join(NODES)} nor a file with the fields of "
            f"Node in moe_parallel/plan/cluster.py: {error}"
        ) from None


#: Seconds of a node that can be measured, and the most that they can be.
TIMES, LONGEST = ("call_time", "kernel_time"), 0.01


def measured(path: Path, cluster: Cluster) -> Cluster:
    """The cluster with the shares and seconds of a JSON file in place of the published ones.

    Raises InputError if the file is not an object of known names with shares above 0, up to 1, and
    with seconds from 0 to LONGEST.
    """
    try:
        found = parse_json(read_small(path))
    except (OSError, ValueError) as error:
        raise InputError(f"--measured {path} cannot be read as JSON: {error}") from None
    names = [*(field.name for field in fields(Efficiency)), *TIMES]
    if not isinstance(found, dict) or set(found) - set(names):
        raise InputError(f"--measured {path} must be an object with some of {', '.join(names)}")
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and (0 <= value <= LONGEST if name in TIMES else 0 < value <= 1)):
            wanted = f"seconds from 0 to {LONGEST}" if name in TIMES else "a share above 0, up to 1"
            raise InputError(f"--measured {path}: {name} is {value!r}; give {wanted}")
    times = {name: found.pop(name) for name in TIMES if name in found}
    return replace(
        cluster,
        node=replace(cluster.node, **times),
        efficiency=replace(cluster.efficiency, **found),
    )
