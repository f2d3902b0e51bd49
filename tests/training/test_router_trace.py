"""A trace in the program: its resumption, its replay, its loads, and what is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_parallel.config import parse_command_line
from moe_parallel.data.indexed import write_indexed
from moe_parallel.errors import InputError
from moe_parallel.parallel import groups_of_one
from moe_parallel.telemetry import router_trace
from moe_parallel.telemetry.metrics import read_metrics, untimed
from moe_parallel.telemetry.routed_experts import of_vllm, write_texts
from moe_parallel.telemetry.router_trace import crc_of
from moe_parallel.training.router_trace import run_trace
from tests.distributed import run_distributed
from tests.program import SMALL, flags, pretrain_here, small_data
from tests.telemetry.traces import Arrays, change_steps, contents

RUN = {"train_iters": 4, "eval_interval": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of the runs and their ends: whole, stopped and continued, replayed."""
    folder = tmp_path_factory.mktemp("traced")
    options = SMALL | small_data(folder) | RUN
    trace = {"moe_router_trace": folder / "whole" / "trace"}
    cut = {"moe_router_trace": folder / "cut" / "trace", "save": folder / "cut"}
    given = [
        options | trace | {"save": folder / "whole"},
        options | cut | {"exit_interval": 2},
        options | cut | {"load": folder / "cut"},
        options | {"moe_router_replay": folder / "whole" / "trace"} | {"save": folder / "replayed"},
    ]
    (ended,) = run_distributed(1, pretrain_here, given)
    return folder, ended


def records(folder: Path) -> list[dict[str, Any]]:
    return [untimed(record) for record in read_metrics(folder / "metrics.jsonl")]


def test_the_runs_end_well(runs: Any) -> None:
    folder, ended = runs
    assert [code for code, _ in ended] == [0] * 4
    assert f"warning: experts are replayed from {folder / 'whole' / 'trace'}: in tra" in ended[3][1]


def test_a_continued_run_goes_on_with_the_trace(runs: Any) -> None:
    folder, _ = runs
    assert contents(folder / "cut" / "trace") == contents(folder / "whole" / "trace")


def test_the_replay_is_the_same_run(runs: Any) -> None:
    folder, _ = runs
    assert records(folder / "replayed") == records(folder / "whole")


def test_the_trace_has_the_loads_of_the_log(runs: Any) -> None:
    folder, _ = runs
    trace = router_trace.read_trace(folder / "whole" / "trace", "")
    assert list(trace.iterations) == [1, 2, 3, 4]
    logged = [record["layers"] for record in records(folder / "whole") if "layers" in record]
    for iteration, layers in zip(trace.iterations, logged, strict=True):
        experts_LNSK = trace.step(iteration).experts_LNSK
        loads = [np.bincount(of_layer.ravel(), minlength=4).tolist() for of_layer in experts_LNSK]
        assert loads == [layer["tokens_per_expert"] for layer in layers]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another seed": (
        {"seed": 4},
        "FOLDER: sequence 1 of iteration 1 has another text than in this run: use the --data-path, "
        "--split, --seed and --train-iters of the run that was recorded",
    ),
    "more steps": (
        {"train_iters": 6},
        "FOLDER has the iterations 1 to 4, and this run trains 1 to 6: record those too, or end "
        "earlier with --exit-interval",
    ),
    "more experts": (
        {"num_experts": 8},
        "FOLDER is of a run with --num-experts 4, and this run has 8: use the same, or another "
        "trace",
    ),
    "another batch": (
        {"global_batch_size": 4},
        "FOLDER is of a run with --global-batch-size 8, and this run has 4: use the same, or "
        "another trace",
    ),
}


def refused_here(cases: list[dict[str, Any]]) -> list[str]:
    found = []
    for options in cases:
        with pytest.raises(InputError) as caught:
            pretrain_here([options])
        found.append(str(caught.value))
    return found


def filled_here(options: dict[str, Any], steps: int) -> str:
    """The message of a run whose disk is full after a number of steps of the trace."""
    left, write = [steps], router_trace.write_atomically

    def write_while_there_is_room(*given: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router_trace, "write_atomically", write_while_there_is_room)
        (message,) = refused_here([options])
    return message


@pytest.mark.full
def test_a_full_disk_ends_the_run_in_a_line(tmp_path: Path) -> None:
    """All complete steps remain, and the run goes on from its checkpoint when there is room."""
    options = SMALL | small_data(tmp_path) | RUN | {"save_interval": 1}
    trace = tmp_path / "cut" / "trace"
    traced = options | {"moe_router_trace": trace, "save": tmp_path / "cut"}
    (message,) = run_distributed(1, filled_here, traced, 2)
    words = "trace cannot be written (No space left on device): make room and continue with --load"
    assert words in message and "\n" not in message
    assert sorted(contents(trace)) == ["1.npz", "2.npz"]
    given = [
        traced | {"load": tmp_path / "cut"},
        options | {"moe_router_trace": tmp_path / "trace", "save": tmp_path / "whole"},
    ]
    (ended,) = run_distributed(1, pretrain_here, given)
    assert [code for code, _ in ended] == [0, 0]
    assert contents(trace) == contents(tmp_path / "trace")


def test_every_rank_refuses_a_text_that_one_of_them_reads(runs: Any, tmp_path: Path) -> None:
    folder, _ = runs

    def change(arrays: Arrays) -> None:
        arrays["text"][6] += 1  # of the second rank

    change_steps(folder / "whole" / "trace", tmp_path / "other", change)
    case = SMALL | small_data(folder) | RUN | {"moe_router_replay": tmp_path / "other"}
    for (message,) in run_distributed(2, refused_here, [case]):
        assert "other: sequence 7 of iteration 1 has another text" in message


def test_choices_that_the_system_cannot_make_are_refused(runs: Any, tmp_path: Path) -> None:
    """A token without an expert in top-K, which damages memory where it is believed."""
    folder, _ = runs

    def change(arrays: Arrays) -> None:
        arrays["experts"][1, 3, 2, 1] = -1

    change_steps(folder / "whole" / "trace", tmp_path / "other", change)
    case = SMALL | small_data(folder) | RUN | {"moe_router_replay": tmp_path / "other"}
    ((message,),) = run_distributed(1, refused_here, [case])
    assert message.endswith(
        "other: tokens of iteration 1 have choices that --expert-selection topk cannot make: "
        "record a run of the same system"
    )


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_replay_needs_the_steps_until_the_run_leaves(done: int) -> None:
    """With --exit-interval 4 that is after iterations 4 and 8, wherever the run continues."""
    options = {"train_iters": 10, "exit_interval": 4, "moe_router_replay": "trace"}
    trace = run_trace(parse_command_line(flags(SMALL | options)), groups_of_one())
    assert trace is not None
    trace._check_steps(range(1, 5), done)
    trace._check_steps(range(1, 9), done + 4)
    with pytest.raises(InputError, match=rf"1 to 7, and this run trains {done + 5} to 8"):
        trace._check_steps(range(1, 8), done + 4)


def test_choices_of_a_generator_are_replayed_by_text(tmp_path: Path) -> None:
    """40 responses of 16 tokens or more, in three epochs and in whatever order."""
    chance = np.random.default_rng(1)
    length, texts = 16, chance.integers(0, 250, (40, 18)).tolist()
    scores_NTLE = chance.random((40, 17, 2, 4))
    responses = np.argsort(-scores_NTLE, axis=3)[..., :2].astype(np.uint8)  # as vLLM's
    choices = [of_vllm(response, [1, 2]) for response in responses]
    write_texts(tmp_path / "texts" / "texts-all.npz", texts, choices, length, 4, [1, 2])
    options = SMALL | small_data(tmp_path) | RUN
    write_indexed(tmp_path / "responses", [text[:length] for text in texts], 300)
    options |= {
        "data_path": [tmp_path / "responses"],
        "split": "1,0,0",
        "seq_length": length,
        "train_iters": 12,
        "eval_interval": None,
        "moe_router_replay": tmp_path / "texts",
        "moe_router_trace": tmp_path / "trace",
        "expert_model_parallel_size": 2,
    }
    assert [code for ends in run_distributed(2, pretrain_here, [options]) for code, _ in ends] == [
        0,
        0,
    ]
    of_text = {crc_of(np.array(text[:length])): number for number, text in enumerate(texts)}
    seen = set()
    trace = router_trace.read_trace(tmp_path / "trace", "")
    for iteration in trace.iterations:
        step = trace.step(iteration)
        for place, text in enumerate(step.text_N.tolist()):
            number = of_text[text]
            seen.add(number)
            expected_SLK = responses[number, :length].tolist()
            assert step.experts_LNSK[:, place].swapaxes(0, 1).tolist() == expected_SLK
    assert len(trace.iterations) == 12 and len(seen) == 40
