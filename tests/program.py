"""The complete program on small data: in its own processes, or on the ranks of a test.

run_distributed(2, pretrain_here, [SMALL | {"save": folder} | small_data(folder)])

with Program(SMALL | small_data(folder), ranks=2) as program:     # costs seconds to start
    program.wait_for("iteration 3")
    os.kill(program.rank(1), signal.SIGTERM)
    print(program.finish())
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from torch import distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_parallel.analysis.run_figure import FIGURE_NAME
from moe_parallel.config import Config, validate
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training import pretrain as final_report
from moe_parallel.training import pretrain as main_module
from moe_parallel.training.pretrain import pretrain
from moe_parallel.training.run_config import run_config
from moe_parallel.training.signals import StopRequest
from tests.data.small_text import small_bpe, words, write_texts
from tests.distributed import PRELOADED

SCRIPT = Path(__file__).parents[1] / "pretrain_gpt_moe.py"
WITHOUT_WANDB = Path(__file__).parent / "without_wandb"

Options = Mapping[str, Any]  # flags without dashes, as in Python: {"num_layers": 2}

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "seq_length": 32,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 4,
    "lr": 1e-2,
    "min_lr": 1e-3,
    "lr_warmup_iters": 2,
    "log_interval": 1,
    "eval_iters": 1,
    "tensorboard": False,
}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 8}

#: A run long enough to be disturbed: its last iteration, and its options besides SMALL.
LAST = 12
EVERY_2: Options = {
    "train_iters": LAST, "save_interval": 2, "eval_interval": 3, "eval_iters": 20,
    "use_distributed_optimizer": True,  # so that every rank has tensors to write
}  # fmt: skip


def small_data(folder: Path) -> dict[str, Any]:
    """Write a tokenizer and two domains, `cycle` (easy to learn) and `noise`; the data flags."""
    tokenizer = small_bpe()
    tokenizer.save(folder / "tokenizer")
    names = "zero one two three four five six seven".split()
    for name, texts in (
        ("cycle", [" ".join(itertools.islice(_cycle(names, n), 150)) for n in range(20)]),
        ("noise", [words(150, seed) for seed in range(20)]),
    ):
        write_texts(folder / name, texts, tokenizer)
    return {
        "data_path": [folder / "cycle", folder / "noise"],
        "split": "9,1,0",
        "tokenizer_model": folder / "tokenizer",
        "data_cache_path": folder / "cache",
    }


def _cycle(names: list[str], first: int) -> Iterator[str]:
    return itertools.islice(itertools.cycle(names), first % len(names), None)


def flags(options: Options) -> list[str]:
    """The command line for the options; an option that is None is omitted."""
    line: list[str] = []
    for name, value in options.items():
        if value is not None:
            parts = value if isinstance(value, (list, tuple)) else [value]
            line += ["--" + name.replace("_", "-"), *(str(part) for part in parts)]
    return line


def pretrain_here(
    runs: Iterable[Options],
    before: Callable[[], object] | None = None,
    *,
    figures: bool = False,
) -> list[tuple[int, str]]:
    """Run the program on the ranks of `run_distributed`, once for each set of options.

    Returns (exit code, output of this rank) for each run. An exception of the program is raised
    here, because `failure.run`, which would end the process, is not used. `before` is called
    first on each rank and may replace parts of the program. Without `figures` the figure is an
    empty file, because drawing takes longer than all else that a small run does.
    """
    if not figures and main_module.write_figure is final_report.write_figure:
        main_module.write_figure = _empty_figure
    if before is not None:
        before()
    ends = []
    for options in runs:
        given = run_config(flags(options))
        config = given.config
        validate(config, dist.get_world_size())
        groups = initialize_groups(config.parallel, config.virtual_stages)
        try:
            with (
                StopRequest().listening() as stop,
                contextlib.redirect_stdout(io.StringIO()) as printed,
            ):
                code = pretrain(config, groups, stop, given.warnings)
        finally:
            parallel_state.destroy_model_parallel()
            destroy_num_microbatches_calculator()
        destroy_groups()  # not after an error: the state of the other ranks is then unknown
        ends.append((code, printed.getvalue()))
    return ends


def _empty_figure(config: Config, parameters: int) -> str:
    assert config.checkpoint.save is not None
    path = Path(config.checkpoint.save) / FIGURE_NAME
    path.touch()
    return f"figure: {path}"


def pretrain_and_draw(runs: Iterable[Options]) -> list[tuple[int, str]]:
    """`pretrain_here` with the figure at the end of each run."""
    return pretrain_here(runs, figures=True)


def stored_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint (weights, moments, master weights), read with torch only."""
    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def same_bytes(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names, shapes, dtypes and bits."""
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype
        and x.shape == b[name].shape
        and torch.equal(x.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
        for name, x in a.items()
    )


class Job:
    """Processes whose output goes to a file."""

    def __init__(self, folder: Path) -> None:
        self._output_file = folder / "output.txt"
        self._output_file.write_text("")  # left by an earlier job in the same folder

    @property
    def output(self) -> str:
        """The output of all processes, both streams."""
        return self._output_file.read_text(errors="replace")

    def running(self) -> bool:
        raise NotImplementedError

    def wait_for(self, text: str, timeout: float = 600) -> None:
        """Wait until `text` has been printed."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if not self.running() or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not printed:\n{self.output}")
            time.sleep(0.05)


class Ranks(Job):
    """Ranks that call a function as under torchrun: with its environment variables, and with a
    store that outlives them. The context manager ends them on exit."""

    def __init__(
        self, folder: Path, world_size: int, function: Callable[..., Any], *args: Any
    ) -> None:
        """`function` may end its process; if it returns, the exit code is 0. The ranks run in
        `folder`, which also contains their output."""
        super().__init__(folder)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store: dist.TCPStore | None = store
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._ranks = []
        with mock.patch.dict(os.environ, environment()):  # for a fork server that starts now
            for rank in range(world_size):
                place = (rank, world_size, store.port, self._output_file)
                process = context.Process(target=_be_rank, args=(place, function, args))
                process.start()
                self._ranks.append(process)

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        pid = self._ranks[rank].pid
        assert pid is not None
        return pid

    def lose_store(self) -> None:
        """End the store, as if torchrun had died without ending its ranks."""
        self._store = None

    def running(self) -> bool:
        return any(process.is_alive() for process in self._ranks)

    def finish(self, timeout: float = 600) -> list[int | None]:
        """The exit codes, by rank, of processes that ended by themselves; None: still running."""
        deadline = time.monotonic() + timeout
        for process in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self._ranks]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._ranks:
            process.kill()
            process.join()


def _be_rank(
    place: tuple[int, int, int, Path], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    rank, world_size, port, output_file = place
    output = os.open(output_file, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(output_file.parent)
    os.environ.update(environment())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(1)
    function(*args)


class Program(Job):
    """`python pretrain_gpt_moe.py --nproc-per-node N ...`, in a folder that contains the output.

    The context manager ends it on exit.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
        script: Path = SCRIPT,
    ) -> None:
        super().__init__(folder)
        with self._output_file.open("wb") as output:
            self._process = psutil.Popen(
                [sys.executable, *self._start(script, world_size), *arguments],
                cwd=folder,
                env=os.environ | environment() | dict(variables or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _start(self, script: Path, world_size: int) -> list[str]:
        return [str(script), "--nproc-per-node", str(world_size)]

    @property
    def pid(self) -> int:
        """The process id of the launcher."""
        return int(self._process.pid)

    def running(self) -> bool:
        return self._process.poll() is None

    def finish(self, timeout: float = 600) -> int:
        """Wait until the launcher has ended by itself; returns its exit code."""
        return int(self._process.wait(timeout))

    def rank(self, rank: int) -> int:
        """The process id of a rank."""
        (found,) = [each.pid for each in self.ranks() if each.environ()["RANK"] == str(rank)]
        return int(found)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks that are alive."""
        return [
            process
            for process in self._process.children()
            if process.status() != psutil.STATUS_ZOMBIE and "RANK" in process.environ()
        ]

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*self._process.children(recursive=True), self._process]
            for member in family:  # each rank has its own session
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=10)


class Torchrun(Program):
    """`torchrun --nproc-per-node N pretrain_gpt_moe.py ...`; otherwise the same."""

    def _start(self, script: Path, world_size: int) -> list[str]:
        module = ["-m", "torch.distributed.run", "--master-port", str(free_port())]
        return [*module, "--nproc-per-node", str(world_size), str(script)]


def environment() -> dict[str, str]:
    """The variables of the processes that tests start."""
    first = [str(WITHOUT_WANDB), str(SCRIPT.parent)]
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([*first, *(path for path in sys.path if path)]),
    }


def give_user(folder: Path) -> None:
    """What a user of a checkout has there: the programs, and texts of his own."""
    for name in ("examples", "tools", SCRIPT.name):
        (folder / name).symlink_to(SCRIPT.parent / name)
    for number in range(20):
        file = folder / "my_texts" / f"part {number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(words(400, number))


def run_as_user(command: Sequence[str], folder: Path) -> str:
    """What a command prints that a user gives in `folder`, where modules of his own may be."""
    variables = environment()
    variables |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder), variables["PYTHONPATH"]]),
        "HF_MODULES_CACHE": str(folder / "modules"),  # the code of an export is copied there
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port() -> int:
    """A free port below the range from which the system takes ports for connections."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free")
