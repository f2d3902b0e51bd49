"""Training that continues from a conversion recovers the loss of the conversion."""

import json

import numpy
import pytest

from tests.convert.converting import convert_here
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data

RANK = 4
MODEL = SMALL | {
    "moe_ffn_hidden_size": 48,
    "train_iters": 150,
    "lr_warmup_iters": 10,
    "log_interval": 50,
    "eval_iters": 4,
}
HEALING = {"aoe_low_rank_size": RANK, "train_iters": 30, "lr": 5e-3, "log_interval": 30}


def losses_after(folder, seed):
    """Held-out losses: the model, its conversion, the healed conversion, and the same AoE model
    trained from random weights for the same number of steps."""
    moe = MODEL | small_data(folder) | {"seed": seed, "save": folder / "moe"}
    pretrain_here([moe])
    gate = {"rank": RANK, "ranking_columns": 0}  # the weakest ranking, so there is much to heal
    done = convert_here(folder / "moe", folder / "aoe", "aoe", HEALING, gate)
    new = {"config": folder / "aoe" / "config.yaml"}
    pretrain_here(
        [
            new | {"load": folder / "aoe", "save": folder / "healed"},
            new | {"save": folder / "scratch"},
        ]
    )
    source, converted = zip(*done.losses.values(), strict=True)
    ends = [_last_losses(folder / name) for name in ("healed", "scratch")]
    return [float(numpy.mean(each)) for each in (source, converted, *ends)]


def _last_losses(run):
    *_, last = map(json.loads, (run / "metrics.jsonl").open())
    return [domain["loss"] for domain in last["validation"].values()]


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_healing_recovers_most_of_the_gap(tmp_path, seed):
    ((source, converted, healed, scratch),) = run_distributed(1, losses_after, tmp_path, seed)
    # Measured on seeds 1, 2 and 3: gaps of 0.66, 0.79 and 0.80 nats/token. Healing recovers 99.2,
    # 96.4 and 99.8%. From random weights the same 30 steps end at 3.33, 3.41 and 3.36.
    assert converted - source > 0.3
    assert converted - healed > 0.8 * (converted - source)
    assert scratch - healed > 1
