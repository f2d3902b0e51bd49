"""A Slurm cluster whose nodes are namespaces of this machine: real daemons, real sbatch and srun.

with Cluster(2, folder) as cluster:
    job = cluster.sbatch("examples/slurm/pretrain.sbatch", "runs/my", "--config", "my.yaml")
    cluster.wait_for(job, "COMPLETED")
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cluster.nodes import HUB, Nodes, what_is_missing

#: Debian's package of each program that the tests start.
PACKAGES = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("mount", "umount"), "mount"),
    **dict.fromkeys(("sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel"), "slurm-client"),
    "hostname": "hostname",
    "munged": "munge",
    "nft": "nftables",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "unshare": "util-linux",
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")

# Every node claims CPUs and GPUs that it does not have, so that scripts for real nodes fit.
URGENT = "urgent"  # the partition whose jobs take the nodes of others
CPUS, GPUS, MEMORY = 64, 8, 1_000_000


def why_not() -> str | None:
    """The reason why this machine cannot have a cluster, and the remedy; None if it can."""
    return what_is_missing(PACKAGES)


def _belongs_to(pid: int, job: str) -> bool:
    try:
        process = psutil.Process(pid)
        of_job = process.environ().get("SLURM_JOB_ID") == job
        return of_job or " ".join(process.cmdline()).startswith(f"slurmstepd: [{job}.")
    except psutil.Error:  # it has ended
        return False


class Cluster:
    """`number` nodes with a running slurmd, and a controller on the hub."""

    def __init__(self, number: int, folder: Path) -> None:
        """`folder` must be empty; it gets the daemons' configuration, state and logs."""
        self.folder = folder
        self.small_disk = folder / "disk"  # of 2 MiB, if the machine permits to mount one
        self.nodes = Nodes(number)
        self.outputs: list[Path] = []  # of jobs, for the message of a test that fails
        self._pid_files: list[Path] = []
        # Slurm makes sockets in them, and the path of a socket has at most 108 bytes.
        self._spool = tempfile.TemporaryDirectory(prefix="spool", ignore_cleanup_errors=True)

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the daemons by their pid files, then remove the nodes with all that is left."""
        for file in reversed(self._pid_files):
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        self.nodes.down()
        if self.small_disk.is_mount():
            subprocess.run(["umount", "--lazy", str(self.small_disk)], check=True)
        self._spool.cleanup()

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run one of Slurm's commands as a user would; returns what it printed."""
        return self.nodes.run(HUB, *words, env={**self.environment, **(env or {})})

    def ask(self, *words: str) -> str:
        """Run a command that changes nothing.

        The controller may close the connection of a command that was slow, which SIGPIPE then ends:
        it is asked again.
        """
        for _ in range(3):
            asked = self.nodes.call(HUB, words, self.environment)
            if asked.returncode != -signal.SIGPIPE:
                break
        assert asked.returncode == 0, (asked.returncode, words, asked.stdout, asked.stderr)
        return asked.stdout

    def sbatch(self, *words: str, env: Mapping[str, str] | None = None) -> int:
        """Submit a job: flags, script and its arguments. `env`: variables the user has exported."""
        return int(self.run("sbatch", "--parsable", *words, env=env).split(";")[0])

    def facts(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` says, by name."""
        words = self.ask("scontrol", "--oneliner", "show", "job", str(job)).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def state(self, job: int | str) -> str:
        return self.facts(job)["JobState"]

    def wait_for(self, job: int, state: str, timeout: float = 300) -> None:
        """Wait for a state of a job. Fails at once if the job ends in another one."""

        def reached() -> bool:
            found = self.state(job)
            assert found == state or found not in ENDED, f"{found}, not {state}\n{self.logs()}"
            return found == state

        self.wait_until(reached, timeout, f"job {job} is {state}")

    def wait_until(self, reached: Callable[[], bool], timeout: float, what: str) -> None:
        wait = self.deadline(timeout)
        while not reached():
            wait(what)

    def deadline(self, timeout: float) -> Callable[[str], None]:
        """A function that sleeps for a moment, and fails when the time is over."""
        end = time.monotonic() + timeout

        def wait(what: str) -> None:
            assert time.monotonic() < end, (
                f"after {timeout} s it is still not so that {what}\n"
                f"{self.run('squeue', '--all')}{self.run('sinfo', '-N')}{self.logs()}"
            )
            time.sleep(0.05)

        return wait

    def start_now(self, job: int | str, nodes: int | None = None) -> None:
        """Start a requeued job, which is pending, at once; Slurm waits about two minutes.

        `nodes`: the number that it needs, which must be idle first; None: all.
        """
        needed = len(self.nodes.names) if nodes is None else nodes

        def has_started() -> bool:  # by itself, and then its nodes may be busy for long
            return self.state(job) == "RUNNING"

        self.wait_until(
            lambda: len(self.idle_nodes()) >= needed or has_started(),
            120,
            f"{needed} nodes are idle",
        )
        if has_started():
            return
        # A node on which the job has a process refuses it, and Slurm drains the node. It also
        # refuses a job that starts in the second in which it ended there.
        self.wait_until(lambda: not self.processes_of(job), 120, f"all of job {job} has ended")
        time.sleep(2)
        if "held" in self.ask("squeue", "--noheader", f"--jobs={job}", "--format=%r"):
            # The controller holds a job whose start a node refused, until somebody releases it.
            self.run("scontrol", "release", str(job))
        with suppress(AssertionError):  # it has started by itself
            self.run("scontrol", "update", f"jobid={job}", "StartTime=now")

    def processes_of(self, job: int | str) -> list[int]:
        """The processes of a job, and of Slurm's daemons for it, on all nodes."""
        return [
            pid
            for name in self.nodes.names
            for pid in self.nodes.processes(name)
            if _belongs_to(pid, str(job))
        ]

    def kill_node(self, name: str) -> None:
        """Kill all of a node: slurmd, launchers, ranks."""
        self.nodes.kill(name)

    def start_node(self, name: str) -> None:
        """Start slurmd on a node, as a node does that boots."""
        (Path(self._spool.name) / name).mkdir(exist_ok=True)
        self._daemon(name, "slurmd", "-f", str(self._config), pid=f"slurmd.{name}.pid")

    def wait_for_nodes(self, timeout: float = 60) -> None:
        """Wait until all nodes are idle, after an administrator has looked at drained ones."""
        for name in self._listed("-t", "drain"):
            self.run("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait_until(self.idle, timeout, "all nodes are idle")

    def idle(self) -> bool:
        """Whether every node waits for a job."""
        return len(self.idle_nodes()) == len(self.nodes.names)

    def nodes_that_answer(self) -> list[str]:
        """Those that Slurm does not take for lost."""
        return self._listed("-r")

    def idle_nodes(self) -> list[str]:
        return self._listed("-t", "idle")

    def _listed(self, *flags: str) -> list[str]:
        """The nodes that sinfo lists with these flags; it has a line for each of its partitions."""
        return sorted(set(self.ask("sinfo", "--noheader", "-N", "-o", "%N", *flags).split()))

    def logs(self) -> str:
        """The last lines of the controller and of every file that a job wrote."""
        files = [self.folder / "slurmctld.log", *self.outputs[-2:]]
        return "".join(
            f"\n--- {file}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-40:])
            for file in files
            if file.exists()
        )

    @property
    def _config(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of Slurm's daemons and commands, and with these of the jobs."""
        kept = ("PATH", "HOME", "LANG", "TERM", "OMP_NUM_THREADS", "PYTHONPATH")
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "SLURM_CONF": str(self._config),
        }

    def _start(self) -> None:
        self._configure()
        # Before the daemons: they would not see a later mount of this process.
        self.small_disk.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(self.small_disk)]
        subprocess.run(words, capture_output=True, check=False)
        munge = self.folder / "munge"
        self._daemon(
            HUB, "munged", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            pid="munge/pid",
        )  # fmt: skip
        self._daemon(HUB, "slurmctld", "-c", "-f", str(self._config), pid="slurmctld.pid")
        for name in self.nodes.names:
            self.start_node(name)
        self.wait_for_nodes()

    def _daemon(self, node: str, *words: str, pid: str) -> None:
        """Start a daemon, which leaves the foreground by itself."""
        log = self.folder / f"{words[0]}.start"
        with log.open("a") as output:
            code = subprocess.run(
                self.nodes.command(node, words), stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, env=self.environment, check=False,
            ).returncode  # fmt: skip
        assert code == 0, f"{words} on {node}: {log.read_text()}"
        if self.folder / pid not in self._pid_files:
            self._pid_files.append(self.folder / pid)

    def _configure(self) -> None:
        for name in ("etc", "munge", "state", "devices"):
            (self.folder / name).mkdir()
        # munged refuses a folder that others may write to, and clients must reach its socket.
        for folder in (self.folder, self.folder / "munge"):
            folder.chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for i in range(GPUS):
            (self.folder / "devices" / f"nvidia{i}").touch()
        etc = self.folder / "etc"
        (etc / "plugstack.conf").write_text("")
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (etc / "gres.conf").write_text(
            f"Name=gpu File={self.folder}/devices/nvidia[0-{GPUS - 1}]\n"
        )
        self._config.write_text(
            "".join(f"{name}={value}\n" for name, value in self._options().items())
            + f"NodeName=node[1-{len(self.nodes.names)}] CPUs={CPUS} RealMemory={MEMORY} "
            f"Gres=gpu:{GPUS} State=UNKNOWN\n"
            "PartitionName=debug Nodes=ALL Default=YES PriorityTier=1 GraceTime=30\n"
            f"PartitionName={URGENT} Nodes=ALL PriorityTier=2\n"
        )

    def _options(self) -> dict[str, object]:
        folder = self.folder
        return {
            "ClusterName": "moe",
            "SlurmctldHost": f"{HUB}({self.nodes.address(HUB)})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={folder}/munge/socket",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MpiDefault": "none",
            "SwitchType": "switch/none",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "GresTypes": "gpu",
            "SlurmdParameters": "config_overrides",  # believe the numbers above
            "SchedulerType": "sched/backfill",
            # The ends of a test's waits: seconds in place of the minutes of a real cluster.
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
            "SlurmdTimeout": 10,
            "KillWait": 5,
            "ReturnToService": 2,  # a node that answers again is used again
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": f"{self._spool.name}/%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
            "SlurmctldLogFile": folder / "slurmctld.log",
            "SlurmdLogFile": f"{folder}/slurmd.%n.log",
            "PlugStackConfig": folder / "etc" / "plugstack.conf",
        }
