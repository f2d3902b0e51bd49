"""In the layout that saved it, a run continues bit for bit."""

import hashlib
import json
import random

import numpy
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moe_parallel.training.optimizer import gather_weights
from tests.distributed import run_distributed
from tests.tiers import rest_in_full
from tests.training.tiny_run import AOE, BATCH, GATHERED, LENGTH, OVERLAP, Layout, TinyRun

# Only the loss reads the head's weights.
UNTIED = {"untie_embeddings_and_output_weights": True}
RUNS = {
    "one": (Layout(), {}),
    "ep2-distributed": (Layout(2, ep=2, distributed=True), AOE),
    "gathered-ep2-etp2": (Layout(4, ep=2, etp=2), GATHERED),
    "gathered-bf16-ep2-distributed": (Layout(2, ep=2, distributed=True), GATHERED | {"bf16": True}),
    "overlap-ep2-distributed": (
        Layout(2, ep=2, distributed=True),
        AOE | OVERLAP | UNTIED,
    ),
    "tp2-pp2-vpp2": (Layout(4, tp=2, pp=2, vpp=2), {}),
    "bf16-ep2": (Layout(2, ep=2), {"bf16": True}),
    "bf16-distributed": (Layout(2, distributed=True), {"bf16": True}),
}
QUICK = ("gathered-bf16-ep2-distributed",)


def _six_steps_twice(layout, options, path):
    """Once without a stop, and once with a checkpoint that is saved in the middle."""
    run = TinyRun(layout, path, options=options)
    measured, weights = run.steps(6), _bytes(run)
    run.close()
    run = TinyRun(layout, path, options=options)
    saving = run.steps(3)
    run.save()
    saving += run.steps(3)
    assert saving == measured and _bytes(run) == weights
    return measured[3:], weights


def _load_and_three(layout, options, path):
    run = TinyRun(layout, path, options={**options, "seed": 99})
    run.load(path)
    return run.steps(3), _bytes(run)


def _bytes(run):
    """A hash of every parameter's bytes, by name."""
    gather_weights(run.engine.chunks)
    return {
        name: hashlib.sha256(parameter.detach().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in run.parameters()
    }


@pytest.mark.parametrize("name", rest_in_full(RUNS, *QUICK))
def test_three_and_three_steps_are_six(tmp_path, name):
    layout, options = RUNS[name]
    straight = run_distributed(layout.world, _six_steps_twice, layout, options, tmp_path)
    resumed = run_distributed(layout.world, _load_and_three, layout, options, tmp_path)
    assert resumed == straight


def _draw_after_saving(layout, path):
    run = TinyRun(layout, path)
    run.steps(1)
    _draw()
    run.save()
    return _draw()


def _draw_without_and_after_loading(layout, path):
    drawn = []
    for load in (False, True):
        run = TinyRun(layout, path, options={"seed": 7})
        if load:
            run.load(path)
        drawn.append(_draw())
        run.close()
    return drawn


def _draw():
    with get_cuda_rng_tracker().fork():
        forked = torch.rand(3).tolist()
    return {
        "python": random.random(),
        "numpy": numpy.random.rand(),
        "torch": torch.rand(3).tolist(),
        "megatron": forked,
    }


def test_random_states_return_on_the_layout_that_saved_them(tmp_path):
    saved = run_distributed(2, _draw_after_saving, Layout(2, tp=2), tmp_path)
    same = run_distributed(2, _draw_without_and_after_loading, Layout(2, tp=2), tmp_path)
    assert [after for _, after in same] == saved
    assert all(without != after for without, after in same)
    other = run_distributed(2, _draw_without_and_after_loading, Layout(2, ep=2), tmp_path)
    assert all(without["megatron"] == after["megatron"] for without, after in other)


def _save_and_describe(layout, path, tokenizer):
    files = {"config.yaml": "hidden-size: 32\n", "tokenizer": tokenizer}
    run = TinyRun(layout, path, files=files)
    run.steps(1)
    return run.save()


def test_what_a_checkpoint_holds(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "deep").mkdir(parents=True)
    (tokenizer / "deep" / "vocabulary.json").write_text("{}")
    save = tmp_path / "run"
    paths = run_distributed(2, _save_and_describe, Layout(2, ep=2), save, tokenizer)
    checkpoint = save / "iter_0000001"
    assert paths == [checkpoint, checkpoint]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    assert {path.name for path in save.iterdir()} == {
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    }
    assert (checkpoint / "config.yaml").read_text() == "hidden-size: 32\n"
    assert (checkpoint / "tokenizer" / "deep" / "vocabulary.json").read_text() == "{}"
    record = json.loads((checkpoint / "checkpoint.json").read_text())
    training = {"iteration": 1, "consumed_samples": BATCH, "consumed_tokens": BATCH * LENGTH}
    assert record["training"] == training | {"unlogged": None}
    assert record["layout"]["ep"] == record["layout"]["world_size"] == 2
