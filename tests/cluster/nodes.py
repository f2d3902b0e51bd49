"""Nodes on one machine: each has its own network, hostname and address; they share the disk.

A node is a Linux network namespace with a UTS namespace for every process in it. A virtual cable
leads from each node to a bridge in one more namespace, the hub, where the controller of Slurm and
the user's commands run. Nothing of it is visible from the machine's own network, so the addresses
collide with nobody's, and several such clusters can exist at the same time.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NETWORK = "10.77.0"
HUB = "hub"
_NUMBERS = itertools.count(1)  # of the clusters of this process
_FILES = Path("/etc/netns")  # `ip netns exec` puts the files of NAME over those in /etc


def what_is_missing(packages: Mapping[str, str]) -> str | None:
    """The reason why this machine cannot have such nodes, and the remedy; None if it can.

    `packages`: Debian's package of every program that is needed.
    """
    if absent := [name for name in packages if shutil.which(name) is None]:
        needed = " ".join(sorted({packages[name] for name in absent}))
        return (
            f"not installed: {', '.join(absent)}; as root on Debian or Ubuntu: apt-get install "
            f"--no-install-recommends {needed}"
        )
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        return f"this machine allows no namespaces ({probe.stderr.strip()})"
    return None


class Nodes:
    """`number` nodes named node1, node2, ... and the hub."""

    def __init__(self, number: int) -> None:
        self.names = [f"node{i}" for i in range(1, number + 1)]
        self._prefix = f"moe{os.getpid()}-{next(_NUMBERS)}-"
        self._end_those_of_the_dead()
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(name)} {name}\n" for name in [HUB, *self.names]
        )
        for name in [HUB, *self.names]:
            self._add(name, hosts)
        hub = self._namespace(HUB)
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        _ip("-n", hub, "addr", "add", f"{self.address(HUB)}/24", "dev", "br0")
        for name in self.names:
            self._connect(name)

    def address(self, name: str) -> str:
        return f"{NETWORK}.{254 if name == HUB else int(name.removeprefix('node'))}"

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on a node."""
        enter = ["ip", "netns", "exec", self._namespace(name), "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0"; exec "$@"', name, *words]

    def run(self, name: str, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command on a node and return what it printed. Raises if it fails."""
        ran = self.call(name, words, env)
        assert ran.returncode == 0, (ran.returncode, words, name, ran.stdout, ran.stderr)
        return ran.stdout

    def call(
        self, name: str, words: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, whatever comes of it."""
        return subprocess.run(
            self.command(name, words), capture_output=True, text=True, check=False, env=env
        )

    def processes(self, name: str) -> list[int]:
        """The ids of all processes of a node."""
        return _processes(self._namespace(name))

    def kill(self, name: str) -> None:
        """Kill every process of a node, as a power failure does."""
        _kill_all(self._namespace(name))

    def set_link(self, name: str, *, up: bool) -> None:
        """Connect or disconnect the cable of a node."""
        _ip("-n", self._namespace(HUB), "link", "set", self._cable(name), "up" if up else "down")

    def lose_packets(self, name: str, percent: int) -> None:
        """Lose this share of the packets that a node receives, until `lose_packets(name, 0)`."""
        namespace = self._namespace(name)
        enter = ["ip", "netns", "exec", namespace, "nft"]
        if percent == 0:
            subprocess.run([*enter, "delete table netdev loss"], check=True)
            return
        subprocess.run(
            [
                *enter,
                "add table netdev loss; add chain netdev loss in "
                '{ type filter hook ingress device "eth0" priority 0; policy accept; }; '
                f"add rule netdev loss in numgen random mod 100 < {percent} drop",
            ],
            check=True,
        )

    def limit_rate(self, name: str, rate: str) -> None:
        """Limit the link of a node in both directions to a rate in tc's words, such as 100mbit."""
        for namespace, device in (
            (self._namespace(HUB), self._cable(name)),
            (self._namespace(name), "eth0"),
        ):
            words = f"qdisc replace dev {device} root tbf rate {rate} burst 256k latency 200ms"
            subprocess.run(["tc", "-n", namespace, *words.split()], check=True)

    def down(self) -> None:
        """End every process of the nodes and remove them."""
        for name in [*self.names, HUB]:
            _remove(self._namespace(name))

    def _namespace(self, name: str) -> str:
        return self._prefix + name

    def _cable(self, name: str) -> str:
        return f"to-{name}"

    def _add(self, name: str, hosts: str) -> None:
        namespace = self._namespace(name)
        files = _FILES / namespace
        files.mkdir(parents=True)
        (files / "hosts").write_text(hosts)
        (files / "hostname").write_text(name + "\n")
        # Without these, looking up an address waits for name servers that cannot be reached.
        (files / "resolv.conf").write_text("")
        (files / "nsswitch.conf").write_text("hosts: files\n")
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _connect(self, name: str) -> None:
        hub, node, cable = self._namespace(HUB), self._namespace(name), self._cable(name)
        _ip(
            "link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", cable, "netns",
            hub,
        )  # fmt: skip
        _ip("-n", hub, "link", "set", cable, "master", "br0", "up")
        _ip("-n", node, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", node, "link", "set", "eth0", "up")

    @staticmethod
    def _end_those_of_the_dead() -> None:
        """Remove the nodes of test processes that were killed before they could."""
        for line in _ip("netns", "list").splitlines():
            name = line.split()[0]
            pid = name.removeprefix("moe").partition("-")[0]
            if name.startswith("moe") and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                _remove(name)


def _remove(namespace: str) -> None:
    _kill_all(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    shutil.rmtree(_FILES / namespace, ignore_errors=True)


def _kill_all(namespace: str) -> None:
    """Kill until nothing is left: a process may start others while it is being killed."""
    deadline = time.monotonic() + 30
    while left := _processes(namespace):
        assert time.monotonic() < deadline, f"cannot be killed in {namespace}: {left}"
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes(namespace: str) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    alive = []
    for pid in map(int, listed.stdout.split()):
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":  # its parent, outside the node, has not asked for its exit code yet
                alive.append(pid)
    return alive


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
