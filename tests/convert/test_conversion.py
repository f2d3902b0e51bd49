"""Checkpoints converted to another system, and trained from there."""

import pytest
import torch

from moe_parallel.training.standalone import standalone_config, standalone_model, vocab_size_of
from tests.convert.converting import convert_here, groups_of_one
from tests.distributed import RankError, run_distributed
from tests.program import SMALL, pretrain_here, small_data, stored_tensors

RANK = 8
FULL = SMALL["hidden_size"]  # the full width of an expert of SMALL, which is the rank of W_g
# A dense layer, then two of experts, with a shared expert.
LAYERS = {"num_layers": 3, "moe_layer_freq": "[0]+[1]*2", "moe_shared_expert_intermediate_size": 16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run, `moe`, trained on two ranks for a few steps."""
    folder = tmp_path_factory.mktemp("converted")
    model = SMALL | LAYERS | {"expert_model_parallel_size": 2, "init_method_std": 0.1}
    run = {"save": folder / "moe", "train_iters": 8}
    run_distributed(2, pretrain_here, [model | small_data(folder) | run])
    return folder


def convert_in_a_world(*arguments):
    (done,) = run_distributed(1, convert_here, *arguments)
    return done


@pytest.fixture(scope="module")
def converted(trained):
    return convert_in_a_world(
        trained / "moe", trained / "aoe", "aoe", {"aoe_low_rank_size": RANK}, RANK
    )


def test_all_but_the_probs_is_copied(trained, converted):
    old = stored_tensors(trained / "moe" / "iter_0000008")
    new = stored_tensors(converted.checkpoint)
    pairs = 0
    for name, tensor in new.items():
        if name.startswith("optimizer."):
            assert not tensor.any()
        elif "w_p_LDW" in name or "w_out_LWD" in name:
            there = name.replace("w_out_LWD", "w_out_LFD").replace("w_p_LDW", "w_gate_up_LD2F")
            expected = old[there][:, :, 1] if "w_p" in name else old[there]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
            pairs += 1
        elif "w_down" not in name and "w_up" not in name:
            torch.testing.assert_close(tensor, old[name], rtol=0, atol=0)
    assert pairs == 2 * 2 and [layer.number for layer in converted.layers] == [2, 3]


def test_at_full_rank_layers_compute_the_same_for_the_same_choices(trained):
    options = {"aoe_low_rank_size": FULL}
    save = trained / "full"
    convert_in_a_world(trained / "moe", save, "aoe", options, FULL)
    (differences,) = run_distributed(1, layers_with_the_choices_of, trained / "moe", save)
    assert len(differences) == 2
    assert max(differences) < 1e-4


def layers_with_the_choices_of(moe, aoe):
    """The relative differences of the layers' outputs if the router selects for both models."""
    models = []
    differences = []
    with groups_of_one() as groups, torch.no_grad():
        for run in (moe, aoe):
            config = standalone_config([], load=str(run))
            models.append(standalone_model(config, vocab_size_of(config), groups)[0].eval())
        generator = torch.Generator().manual_seed(0)
        x_SBD = torch.randn(20, 2, SMALL["hidden_size"], generator=generator)
        layers = (model.decoder.layers[1:] for model in models)
        for routed, autonomous in zip(*layers, strict=True):
            autonomous.mlp.choose = routed.mlp.choose
            expected, found = routed.mlp(x_SBD)[0], autonomous.mlp(x_SBD)[0]
            differences.append(float((found - expected).norm() / expected.norm()))
    return differences


def test_a_new_start_computes_the_same(trained):
    done = convert_in_a_world(trained / "moe", trained / "again", "topk", {"train_iters": 3})
    assert done.layers == []
    for before, after in done.losses.values():
        assert before == after


def test_refused_before_anything_is_written(trained):
    for rank, samples, message in (
        (FULL + 1, 24, r"--aoe-low-rank-size is 33, but W_g of --load is 32 x 32"),
        (4, 10**6, "--calibration-samples is 1000000"),
    ):
        options = {"aoe_low_rank_size": rank}
        save = trained / "refused"
        with pytest.raises(RankError, match=message):
            convert_in_a_world(trained / "moe", save, "aoe", options, rank, samples)
        assert not save.exists()


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
