"""The whole program on small data: in processes of torchrun, or on the ranks of a test.

run_distributed(2, pretrain_here, [SMALL | {"save": folder} | small_data(folder)])

with Program(SMALL | small_data(folder), ranks=2) as program:     # costs seconds to start
    program.wait_for("iteration 3")
    os.kill(program.rank(1), signal.SIGTERM)
    print(program.finish())
"""

import contextlib
import io
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from torch import distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_parallel.config import parse_command_line, validate
from moe_parallel.parallel import initialize_groups
from moe_parallel.training.pretrain import pretrain
from tests.data.small_text import small_bpe, words, write_texts

SCRIPT = Path(__file__).parents[1] / "pretrain_gpt_moe.py"

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


def small_data(folder: Path) -> dict[str, Any]:
    """Write a tokenizer and two domains, `cycle` (learnt at once) and `noise`; the data flags."""
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
    """The command line of options; None leaves one out."""
    line: list[str] = []
    for name, value in options.items():
        if value is not None:
            parts = value if isinstance(value, (list, tuple)) else [value]
            line += ["--" + name.replace("_", "-"), *(str(part) for part in parts)]
    return line


def pretrain_here(
    runs: Iterable[Options], before: Callable[[], object] | None = None
) -> list[tuple[int, str]]:
    """The program on the ranks of `run_distributed`, once for each set of options.

    Returns (exit code, what this rank printed) of each. What it raises is raised here, as
    `failure.run`, which would end the process, is left out. `before` is called first on each
    rank, and may replace parts of the program.
    """
    if before is not None:
        before()
    ends = []
    for options in runs:
        config = parse_command_line(flags(options))
        validate(config, dist.get_world_size())
        groups = initialize_groups(config.parallel, config.virtual_stages)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                code = pretrain(config, groups)
        finally:
            parallel_state.destroy_model_parallel()
            destroy_num_microbatches_calculator()
        ends.append((code, printed.getvalue()))
    return ends


def stored_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint (weights, moments, master weights), read by torch alone."""
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
    """Whether two sets of tensors have the same names, shapes, types and bits."""
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype
        and x.shape == b[name].shape
        and torch.equal(x.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
        for name, x in a.items()
    )


class Program:
    """`torchrun --nproc-per-node RANKS pretrain_gpt_moe.py ...`; ended with its context."""

    def __init__(
        self, options: Options, folder: Path, *, ranks: int = 2, script: Path = SCRIPT
    ) -> None:
        """`folder`: where it runs and where its output goes."""
        self.output_file = folder / "output.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-port", str(_free_port()), str(script), *flags(options)]
        environment = dict(
            os.environ,
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            GLOO_SOCKET_IFNAME="lo",
            PYTHONPATH=str(SCRIPT.parent),
        )
        with self.output_file.open("wb") as output:
            self._torchrun = psutil.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    @property
    def torchrun(self) -> int:
        """The process that started the ranks."""
        return self._torchrun.pid

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for child in self._torchrun.children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child.pid
        raise AssertionError(f"rank {number} is not running:\n{self.output}")

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Until the program has printed `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if self._torchrun.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not printed:\n{self.output}")
            time.sleep(0.05)

    def finish(self, timeout: float = 120) -> str:
        """Wait until it has ended by itself; returns what it printed."""
        self._torchrun.wait(timeout)
        return self.output

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*self._torchrun.children(recursive=True), self._torchrun]
            for member in family:  # torchrun gives each rank a session of its own
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
