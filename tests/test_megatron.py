"""Our layers in a trainer like Megatron-LM's train the same model as our own program."""

from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.megatron_lm import Trainer, finish
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups

STEPS = 10
_DENSE_FIRST = {"moe_layer_freq": "[0]+[1]*3"}
CASES: dict[str, Options] = {
    "topk": {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01},
    "aoe": {"expert_selection": "aoe", "aoe_low_rank_size": 8, "moe_aux_loss_coeff": 0.05}
    | _DENSE_FIRST,
}


def own_losses(options: Options) -> list[float]:
    config = make_config(SIZES | options)
    engine = build(config)
    losses = [engine.step(micro_batches(config, 4 * n, engine)).lm_loss for n in range(STEPS)]
    destroy_groups()
    return losses


def losses(options: Options, folder: Path) -> list[float]:
    trainer = Trainer(options, folder / "options.yaml")
    found = [trainer.train_step() for _ in range(STEPS)]
    finish()
    return found


def on_one_rank(folder: Path):
    return {name: (own_losses(case), losses(case, folder)) for name, case in CASES.items()}


def test_one(tmp_path):
    (found,) = run_distributed(1, on_one_rank, tmp_path)
    for name, (own, theirs) in found.items():
        print(name, own, theirs)
        assert theirs == pytest.approx(own, rel=1e-5)
