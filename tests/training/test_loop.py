"""The results of the training loop on one rank, read from its files."""

import json
import math

import pytest
import torch

from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, same_bytes, small_data, stored_tensors

ITERATIONS = 8
# The run exits before the report; the schedule has more iterations than are run.
SHORT = {"train_iters": 10, "exit_interval": ITERATIONS}
LR, MIN_LR, WARMUP = SMALL["lr"], SMALL["min_lr"], SMALL["lr_warmup_iters"]

ONE_MICRO_BATCH = {"global_batch_size": 2}  # for what does not depend on the loss
BIASED = ONE_MICRO_BATCH | {"add_qkv_bias": True}
RUNS = {
    "plain": {},
    "saving": {"save_interval": 1, "keep_last": 2},
    "evaluating": {"eval_interval": 1},
    "recompute": {"recompute_granularity": "full"},
    "bf16": {"bf16": True},
    "bf16 recompute": {"bf16": True, "recompute_granularity": "full"},
    "log 4": {"log_interval": 4},
    "2 x 4": {"micro_batch_size": 2, "moe_aux_loss_coeff": 0},
    "4 x 2": {"micro_batch_size": 4, "moe_aux_loss_coeff": 0},
    "8 x 1": {"micro_batch_size": 8, "moe_aux_loss_coeff": 0},
    "linear": {"lr_decay_style": "linear"} | ONE_MICRO_BATCH,
    "constant": {"lr_decay_style": "constant"} | ONE_MICRO_BATCH,
    "WSD": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5} | ONE_MICRO_BATCH,
    "decay in 4": {"lr_decay_iters": 4} | ONE_MICRO_BATCH,
    "first": {"exit_interval": 1} | BIASED,
    "second": {"exit_interval": 2, "weight_decay": 0} | BIASED,
    "second, decayed": {"exit_interval": 2, "weight_decay": 0.5} | BIASED,
}
LEARNING = {"train_iters": 100, "exit_interval": 60, "log_interval": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all of `RUNS`, each in a folder with its name."""
    folder = tmp_path_factory.mktemp("loop")
    data = small_data(folder)
    common = SMALL | data | SHORT
    runs = [common | options | {"save": folder / name} for name, options in RUNS.items()]
    learned = common | LEARNING | {"data_path": folder / "cycle", "save": folder / "learned"}
    run_distributed(1, pretrain_here, [*runs, learned])
    return folder


def _records(save):
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def _logged(save, name):
    return [record[name] for record in _records(save) if name in record]


def _weights(save, iteration):
    return stored_tensors(save / f"iter_{iteration:07d}")


def _losses(folder, name):
    return _logged(folder / name, "lm_loss")


@pytest.mark.full
def test_saving_and_evaluating_change_nothing(folder):
    plain = _losses(folder, "plain")
    assert len(plain) == ITERATIONS
    weights = _weights(folder / "plain", ITERATIONS)
    for name in ("saving", "evaluating"):
        assert _losses(folder, name) == plain
        assert same_bytes(_weights(folder / name, ITERATIONS), weights)
    evaluated = [r["iteration"] for r in _records(folder / "evaluating") if "validation" in r]
    assert evaluated == list(range(1, ITERATIONS + 1))
    layers = [_logged(folder / name, "layers") for name in ("plain", "evaluating")]
    assert layers[0] == layers[1]


@pytest.mark.parametrize("precision", ["", "bf16 "])
def test_recompute_changes_nothing(folder, precision):
    names = [precision.strip() or "plain", f"{precision}recompute"]
    losses = [_losses(folder, name) for name in names]
    assert losses[0] == losses[1]
    layers = [_logged(folder / name, "layers") for name in names]
    assert layers[0] == layers[1]


def test_gradient_accumulation(folder):
    names = ("2 x 4", "4 x 2", "8 x 1")
    losses, norms = ([_logged(folder / n, key) for n in names] for key in ("lm_loss", "grad_norm"))
    for other in (1, 2):
        assert losses[other] == pytest.approx(losses[0], rel=1e-5)
        assert norms[other] == pytest.approx(norms[0], rel=1e-4)


def test_a_logged_line_is_the_mean_since_the_last(folder):
    every = _losses(folder, "plain")
    means = [sum(every[:4]) / 4, sum(every[4:]) / 4]
    assert _losses(folder, "log 4") == pytest.approx(means, rel=1e-12)
    assert _logged(folder / "log 4", "consumed_tokens") == [4 * 256, 8 * 256]


def _cosine(part):
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * part)) / 2


DECAYS = {
    "plain": lambda step: _cosine((step - WARMUP) / (10 - WARMUP)),
    "linear": lambda step: LR - (LR - MIN_LR) * (step - WARMUP) / (10 - WARMUP),
    "constant": lambda step: LR,
    "WSD": lambda step: LR if step <= 5 else _cosine((step - 5) / 5),
    "decay in 4": lambda step: _cosine(min(1, (step - WARMUP) / (4 - WARMUP))),
}


@pytest.mark.parametrize("name", DECAYS)
def test_learning_rates(folder, name):
    """Step n, counted from 0, has the n-th value of the schedule; the schedule starts at 0."""
    expected = [
        LR * step / WARMUP if step <= WARMUP else DECAYS[name](step) for step in range(ITERATIONS)
    ]
    assert _logged(folder / name, "learning_rate") == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_weight_decay_leaves_weights_of_one_axis_alone(folder):
    """In the first step the learning rate is 0; in the second, weights decay by lr * 0.5."""
    start = _weights(folder / "first", 1)
    free, decayed = _weights(folder / "second", 2), _weights(folder / "second, decayed", 2)
    rate = LR / WARMUP
    models = [name for name in start if name.startswith(("decoder.", "embedding."))]
    exempt = [name for name in models if "norm" in name or "bias" in name]
    assert len(exempt) == 7 and len(models) > 14
    for name in models:
        assert not torch.equal(free[name], start[name]), name
        if name in exempt:
            assert torch.equal(decayed[name], free[name]), name
        else:
            difference = free[name] - decayed[name]
            torch.testing.assert_close(difference, rate * 0.5 * start[name], rtol=1e-3, atol=1e-7)


def test_it_learns(folder):
    losses = _losses(folder, "learned")
    assert losses[0] > 4
    assert sum(losses[-5:]) / 5 < 0.5
