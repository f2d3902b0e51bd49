"""A dense model of transformers becomes experts that compute the same."""

from pathlib import Path

import pytest
import torch
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.utils import unwrap_model

from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.pretrain import seed_everything
from moe_parallel.training.run_config import run_config
from moe_parallel.training.run_folder import open_checkpoints
from moe_parallel.training.stages import Stages
from tests.distributed import run_distributed
from tests.huggingface.imported import run_of
from tests.huggingface.models import LENGTH, VOCABULARY, build, save
from tests.program import flags
from tests.tiers import rest_in_full

TOPK = {"expert_selection": "topk", "num_experts": 4, "moe_router_topk": 2}
#: W_g of these models has rank 32, so factors of this rank are exact.
AOE = {"expert_selection": "aoe", "num_experts": 4, "moe_router_topk": 2, "aoe_low_rank_size": 32}


def _first_logits(jobs, tokens_BS):
    """The logits of each upcycled model before its first step, its state, and its moments."""
    found = []
    for run, options in jobs:
        given = {"load": run, "finetune": True, "moe_use_upcycling": True, "seq_length": LENGTH}
        given |= {"micro_batch_size": 1, "global_batch_size": 2, "init_method_std": 0.2, **options}
        config = run_config(flags(given)).config
        groups = initialize_groups(config.parallel)
        seed_everything(config, groups)
        checkpoints = open_checkpoints(config, VOCABULARY, groups)
        stage = Stages(config, VOCABULARY, groups, checkpoints).first()
        (model,) = unwrap_model(stage.engine.chunks)
        model.eval()
        positions = torch.arange(tokens_BS.shape[1]).expand(len(tokens_BS), -1)
        with torch.no_grad():
            logits = model(tokens_BS, positions, None)
        found.append((logits, stage.state.iteration, stage.engine.scheduler.num_steps, stage.note))
        destroy_groups()
        destroy_num_microbatches_calculator()
    return found


@pytest.mark.parametrize("model_type", rest_in_full(["llama", "qwen2", "qwen3"], "qwen2"))
def test_experts_start_from_a_model_of_transformers(model_type: str, tmp_path: Path) -> None:
    saved = save(build(model_type), tmp_path / "theirs")
    run = run_of(saved, tmp_path / "run")
    jobs = [(run, TOPK), (run, AOE | {"aoe_wide_size": 48})]
    (found,) = run_distributed(1, _first_logits, jobs, saved.tokens_BS)
    for logits, iteration, steps, note in found:
        torch.testing.assert_close(logits, saved.logits_BSV, atol=3e-5, rtol=0)
        assert (iteration, steps) == (0, 0)
        assert note == f"every expert starts as the dense layer of {run} at iteration 0"
