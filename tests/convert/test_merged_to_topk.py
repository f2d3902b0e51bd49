"""A Lory model converted to top-k has the same weights, and training continues."""

import pytest
import torch

from tests.convert.converting import convert_here
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data, stored_tensors


@pytest.mark.parametrize("system", ["lory", "lory_prefix"])
def test_weights_are_those_of_the_merged_model(tmp_path, system):
    lory = {"expert_selection": system, "lory_segment_length": 16, "train_iters": 3}
    run_distributed(
        1, pretrain_here, [SMALL | small_data(tmp_path) | lory | {"save": tmp_path / "lory"}]
    )
    options = {"moe_router_topk": 2, "train_iters": 2, "lr_warmup_iters": 1}
    (done,) = run_distributed(
        1, convert_here, tmp_path / "lory", tmp_path / "topk", "topk", options
    )
    old, new = stored_tensors(tmp_path / "lory" / "iter_0000003"), stored_tensors(done.checkpoint)
    assert old.keys() == new.keys()
    for name, tensor in new.items():
        expected = torch.zeros_like(tensor) if name.startswith("optimizer.") else old[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    options = {"config": tmp_path / "topk" / "config.yaml", "load": tmp_path / "topk"}
    ((code, _),), _ = run_distributed(
        2, pretrain_here, [options | {"expert_model_parallel_size": 2, "save": tmp_path / "on"}]
    )
    assert code == 0
