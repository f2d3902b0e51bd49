"""The formula of FLOPs against a count of the products that a model computes."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from moe_parallel.config import make_config
from moe_parallel.model.flops import token_flops
from tests.distributed import run_distributed
from tests.tiers import rest_in_full, selected_values
from tests.training.tiny_run import BATCH, LENGTH, TINY, VOCABULARY, Layout, TinyRun

# Every product is an operator of torch, and none is repeated in the backward pass.
COUNTED = {"attention_backend": "local", "loss_chunk_size": 0, "moe_backend": "reference"}
KEPT = {"aoe_recompute_scores": False, "aoe_recompute_gate": False}
AOE = KEPT | {"expert_selection": "aoe", "aoe_low_rank_size": 8}
SHARED = {"moe_shared_expert_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "top-k": {"moe_router_topk": 3},
    "dense": {"num_experts": None, "moe_layer_freq": "1", "kv_channels": 12},
    "shared expert": SHARED,
    "large router": {"moe_router_hidden_size": 20},
    "hash": {"expert_selection": "hash"},
    "factorized W_g": {"moe_gate_low_rank_size": 8},
    "AoE": AOE,
    "AoE, shared expert": AOE | SHARED,
    "AoE, W_down gathered": AOE | {"aoe_gather_w_down": True},
    "Lory": {"expert_selection": "lory", "lory_segment_length": 6},  # the last of three is shorter
    "prefix": {"expert_selection": "lory_prefix", "lory_segment_length": 6},
    "SMEAR": {"expert_selection": "smear", "smear_sees_the_future": True},
    "UoE": {"expert_selection": "uoe", "uoe_routing_neurons": 3},
}


def _count(path: Path, models: list[dict[str, Any]]) -> list[int]:
    """The FLOPs of one step of each model, by torch's own formulas of operators."""
    counts = []
    for model in models:
        run = TinyRun(Layout(), path, options=COUNTED | model)
        with FlopCounterMode(display=False) as counter:
            run.steps(1)
        counts.append(counter.get_total_flops())
        run.close()
    return counts


QUICK = ("top-k", "dense", "factorized W_g", "AoE, shared expert", "Lory", "prefix", "UoE")


@pytest.fixture(scope="module")
def counts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, int]:
    """By model, of those that this session tests."""
    models = selected_values(request, "model", MODELS)
    folder = tmp_path_factory.mktemp("flops")
    ((*found,),) = run_distributed(1, _count, folder, [MODELS[name] for name in models])
    return dict(zip(models, found, strict=True))


@pytest.mark.parametrize("model", rest_in_full(MODELS, *QUICK))
def test_the_formula_is_what_a_step_computes(model: str, counts: dict[str, int]) -> None:
    config = make_config(TINY | MODELS[model])
    mean = config.selection.mean_choices
    assert mean is not None
    flops = token_flops(config, config.padded_vocab_size(VOCABULARY), mean)
    # Megatron-Core's attention computes whole scores, 2 * 2 S d, and then masks half of them.
    whole = flops.attention * 2 * LENGTH / (LENGTH + 1)
    forward_and_backward = 3 * (flops.forward - flops.attention + whole)
    # Merged matrices are computed twice; their two gradients are added in place (`addmm_`), which
    # torch does not count.
    expected = BATCH * LENGTH * (forward_and_backward - flops.merging)
    assert counts[model] == pytest.approx(expected, rel=2e-5 if flops.merging else 1e-12)
