import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from moe_parallel.config import LoggingConfig
from moe_parallel.training.instruments import Profile, covered, summarize
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data

STEPS = {"profile": True, "profile_step_start": 2, "profile_step_end": 4}
SHORT = {"train_iters": 5, "lr_warmup_iters": 1, "eval_iters": 0, "log_interval": 1}


def event(
    name: str, begin: float, end: float, *, kernel: bool = False, annotation: bool = False
) -> SimpleNamespace:
    """An event of torch's profiler, with times in microseconds."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=begin, end=end),
        device_type=DeviceType.CUDA if kernel else DeviceType.CPU,
        is_user_annotation=annotation,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that is profiled, one that is not, and one that ends meanwhile."""
    folder = tmp_path_factory.mktemp("profile")
    common = SMALL | small_data(folder) | SHORT
    cases = {"profiled": STEPS, "plain": {}, "left": STEPS | {"exit_interval": 2}}
    run_distributed(
        1,
        pretrain_here,
        *[[common | case | {"save": folder / name} for name, case in cases.items()]],
    )
    return folder


def _losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["lm_loss"] for line in lines if "lm_loss" in line]


def _steps_in(run, first=2):
    """The number of steps that the trace shows: each calls the optimizer once."""
    with gzip.open(run / "profile" / f"iter_{first:07d}_rank0.json.gz") as trace:
        names = [each.get("name", "") for each in json.load(trace)["traceEvents"]]
    return sum(name.startswith("Optimizer.step") for name in names)


@pytest.mark.full
def test_the_chosen_steps_are_recorded(runs):
    assert _steps_in(runs / "profiled") == 2
    text = (runs / "profiled" / "profile" / "iter_0000002_rank0.txt").read_text()
    assert text.startswith("profile of 2 steps: ") and "aten::mm" in text


@pytest.mark.full
def test_a_run_that_ends_before_writes_what_it_recorded(runs):
    assert _steps_in(runs / "left") == 1
    assert (
        (runs / "left" / "profile" / "iter_0000002_rank0.txt")
        .read_text()
        .startswith("profile of 1 step: ")
    )


@pytest.mark.full
def test_recording_changes_nothing(runs):
    assert _losses(runs / "profiled") == _losses(runs / "plain")
    assert not (runs / "plain" / "profile").exists()


@pytest.mark.full
def test_only_the_chosen_ranks_are_recorded(tmp_path):
    options = SMALL | small_data(tmp_path) | SHORT | STEPS | {"train_iters": 2}
    two = options | {"profile_ranks": [1], "save": tmp_path / "run", "global_batch_size": 4}
    run_distributed(2, pretrain_here, [two])
    names = {path.name for path in (tmp_path / "run" / "profile").iterdir()}
    assert names == {"iter_0000002_rank1.json.gz", "iter_0000002_rank1.txt"}


def test_what_the_device_and_the_host_did():
    events = [
        event("cudaLaunchKernel", 0, 10),
        event("cudaMemcpyAsync", 20, 25),
        event("cudaStreamSynchronize", 100, 600),
        event("cudaStreamSynchronize", 700, 1200),
        event("aten::mm", 0, 50),
        event("sgemm", 1000, 3000, kernel=True),
        event("Memcpy HtoD", 2000, 4000, kernel=True),  # at the same time on another stream
        event("sgemm", 9000, 10000, kernel=True),
        event("Optimizer.step#AdamW.step", 3000, 10000, kernel=True, annotation=True),
    ]
    assert summarize(events, seconds=0.02, steps=2) == (
        "profile of 2 steps: 10.0 ms a step; the device works 2.0 ms of them (20%); "
        "kernels and copies a step: 1; the host waits 0.5 ms in 1 calls"
    )


def test_without_a_gpu_only_the_time_is_told():
    assert summarize([event("aten::mm", 0, 50)], 0.5, 1) == "profile of 1 step: 500.0 ms a step"


def test_time_that_intervals_cover():
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (5, 6), (7, 8)]) == 6


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, capfd):
    (tmp_path / "profile").write_text("a file, where the folder should be")
    logging = LoggingConfig(profile=True, profile_step_start=1, profile_step_end=2)
    for rank in (0, 1):
        config = SimpleNamespace(
            logging=replace(logging, profile_ranks=(rank,)),
            checkpoint=SimpleNamespace(save=str(tmp_path)),
        )
        profile = Profile(config, rank)
        profile.begin_step(1)
        note = profile.end_step(1, is_last=False)
        assert note is not None and note.startswith("warning: the profile was not written to ")
        assert profile.finish() is None
        printed = capfd.readouterr().err  # of rank 0 the run prints the note
        assert (note in printed) == (rank == 1)
