"""--finetune loads only weights; --override-opt-param-scheduler continues with a new schedule."""

import json

import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.optimizer import MASTER
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, pretrain_here, same_bytes, small_data, stored_tensors
from tests.tiers import rest_in_full

RUN = SMALL | AOE | {"moe_router_enable_expert_bias": True, "micro_batch_size": 4}
SYSTEMS = {"fp32": RUN, "bf16-distributed": RUN | {"bf16": True, "use_distributed_optimizer": True}}


@pytest.fixture(scope="module", params=rest_in_full(SYSTEMS, "bf16-distributed"))
def run(request, tmp_path_factory):
    """(options, folder) of a run of four iterations."""
    place = tmp_path_factory.mktemp("run")
    options = SYSTEMS[request.param] | small_data(place)
    run_distributed(2, pretrain_here, [options | {"save": place / "run"}])
    return options, place / "run"


def _records(save):
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "lm_loss" in record]


def _start(options):
    try:
        pretrain_here([options], None)
    except InputError as error:
        return str(error)


def test_a_trained_model_is_trained_on(run, tmp_path):
    options, folder = run
    tuned = tmp_path / "tuned"
    tuning = options | {"finetune": True, "load": folder, "save": tuned, "lr": 2e-3}
    tuning |= {"train_iters": 3, "lr_warmup_iters": 1, "save_interval": 1}
    ((code, printed),) = run_distributed(2, pretrain_here, [tuning])[0]
    assert code == 0
    assert f"the weights are those of {folder} at iteration 4\n" in printed
    assert "going on after" not in printed
    first, *_ = records = _records(tuned)
    assert [record["iteration"] for record in records] == [1, 2, 3]
    assert first["consumed_samples"] == 8 and first["learning_rate"] == 0.0
    assert first["lm_loss"] < _records(folder)[0]["lm_loss"]
    _assert_same_weights(tuned / "iter_0000001", folder / "iter_0000004")  # the rate was 0
    text = (tuned / "config.yaml").read_text()
    assert "finetune: false" in text and "load: null" in text
    # It continues like any run: no saved flag would start it again.
    straight = stored_tensors(tuned / "iter_0000003")
    run_distributed(2, pretrain_here, [{"load": tuned / "iter_0000002"}])
    assert same_bytes(stored_tensors(tuned / "iter_0000003"), straight)


def _assert_same_weights(found, wanted):
    """Also the fp32 masters."""
    found, wanted = stored_tensors(found), stored_tensors(wanted)
    weights = [name for name in wanted if name.startswith(("decoder.", "embedding.", MASTER))]
    weights = [name for name in weights if not name.endswith((".bias_E", ".share_E"))]
    assert len(weights) > 12
    for name in weights:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.full
def test_another_schedule(run, tmp_path):
    options, folder = run
    longer = options | {"load": folder, "save": tmp_path / "longer", "train_iters": 6, "lr": 2e-2}
    (refused, _) = run_distributed(2, _start, longer)
    assert refused is not None and "--lr is 0.01 in the checkpoint and 0.02 here" in refused
    assert refused.endswith("or continue with these by --override-opt-param-scheduler")
    longer |= {"override_opt_param_scheduler": True, "lr_decay_style": "constant"}
    assert run_distributed(2, _start, longer) == [None, None]
    records = _records(tmp_path / "longer")
    assert [record["iteration"] for record in records] == [5, 6]
    assert [record["learning_rate"] for record in records] == [2e-2, 2e-2]
    assert records[0]["consumed_samples"] == 40
    assert "override-opt-param-scheduler: false" in (tmp_path / "longer/config.yaml").read_text()
