"""Bring up a cluster, run a command on its hub, and remove it: to try the job scripts by hand.

    python -m tests.cluster 2 bash
    python -m tests.cluster 4 sinfo -N
    python -m tests.cluster --rate 100mbit 4 bash       # of each node's link, in tc's words

As root. The command gets SLURM_CONF, so sbatch, squeue and scontrol use this cluster.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.nodes import HUB
from tests.cluster.slurm import Cluster, why_not


def main(arguments: list[str]) -> int:
    rate = None
    if arguments[:1] == ["--rate"]:
        rate, arguments = "".join(arguments[1:2]), arguments[2:]
    if len(arguments) < 2 or not arguments[0].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as folder,
        Cluster(int(arguments[0]), Path(folder)) as cluster,
    ):
        for name in cluster.nodes.names if rate is not None else []:
            cluster.nodes.limit_rate(name, rate)
        command = cluster.nodes.command(HUB, arguments[1:])
        return subprocess.run(command, env=cluster.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
