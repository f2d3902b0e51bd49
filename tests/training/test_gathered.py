"""--overlap-param-gather: weights arrive in the next forward pass, or when they are asked for."""

import torch
from megatron.core.utils import unwrap_model

from moe_parallel.training.optimizer import gather_weights
from tests.distributed import run_distributed
from tests.training.tiny_run import AOE, OVERLAP, Layout, TinyRun

LAYOUT = Layout(2, distributed=True)


def _weights(run):
    (model,) = unwrap_model(run.engine.chunks)
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


def _two_steps(path):
    """On a rank: (buckets, weights after the steps, gathered weights, weights without overlap)."""
    run = TinyRun(LAYOUT, path, options=AOE | OVERLAP)
    run.steps(2)  # the first has a learning rate of 0
    after = _weights(run)
    gather_weights(run.engine.chunks)
    gathered, buckets = _weights(run), len(run.engine.chunks[0].bucket_groups)
    run.close()
    run = TinyRun(LAYOUT, path, options=AOE)
    run.steps(2)
    gather_weights(run.engine.chunks)
    return buckets, after, gathered, _weights(run)


def test_a_rank_has_its_share_until_it_asks_for_the_rest(tmp_path):
    ranks = run_distributed(2, _two_steps, tmp_path)
    updated = torch.zeros(len(ranks[0][1]), dtype=torch.int)
    for buckets, after, gathered, expected in ranks:
        assert buckets > 5
        torch.testing.assert_close(gathered, expected, rtol=1e-5, atol=1e-7)
        updated += (after == gathered).int()
        assert not torch.equal(after, gathered)
    assert updated.min() == 1  # each weight is updated by one of the ranks
