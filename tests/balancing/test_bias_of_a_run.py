"""The balancing bias of a bf16 run, read from its checkpoints step by step."""

import json

import pytest
import torch

from tests.distributed import run_distributed
from tests.program import AOE, SMALL, pretrain_here, small_data, stored_tensors

RATE = 0.125
BIASED = {
    "bf16": True,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE,
    "save_interval": 1,
    "exit_interval": 3,
    "eval_interval": "none",
}
SYSTEMS = {
    "topk": {},
    "aoe": AOE,
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "by the length of the run": {"moe_router_bias_update_rate": "none"},
    "frozen after two of four steps": {"moe_router_bias_frozen_share": 0.5},
}
#: That crosses 0.6, the range of probabilities, in a quarter of four steps.
RATES = {"by the length of the run": 0.6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bias")
    common = SMALL | small_data(folder) | BIASED | {"train_iters": 4}
    runs = [common | options | {"save": folder / name} for name, options in SYSTEMS.items()]
    run_distributed(2, pretrain_here, runs)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_each_step_moves_it_by_the_rate_against_the_load(folder, system):
    lines = (folder / system / "metrics.jsonl").read_text().splitlines()
    loads = {r["iteration"]: r["layers"] for r in map(json.loads, lines) if "lm_loss" in r}
    before = [torch.zeros(4), torch.zeros(4)]
    for iteration in (1, 2, 3):
        stored = stored_tensors(folder / system / f"iter_{iteration:07d}")
        biases = [stored[name] for name in sorted(stored) if name.endswith("bias_E")]
        assert len(biases) == 2  # two layers
        for layer, bias in enumerate(biases):
            counts = torch.tensor(loads[iteration][layer]["tokens_per_expert"]).double()
            rate = RATES.get(system, RATE) * (iteration < 3 or not system.startswith("frozen"))
            wanted = before[layer].double() + rate * torch.sign(counts.mean() - counts)
            wanted = (wanted - wanted.mean()).float()
            assert bias.dtype == torch.float32
            assert bias.tolist() == wanted.tolist()
            assert iteration > 1 or (bias != 0).any()
        before = biases
