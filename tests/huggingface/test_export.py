"""An exported model computes what the run's model computes, in transformers, from any layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

import moe_parallel.hf as hf
from tests.distributed import run_distributed
from tests.huggingface.exporting import PROMPT, STEPS, STRONG, export_run, save_runs, train_in_bf16
from tests.program import SMALL, small_data
from tests.systems import options
from tests.tiers import rest_in_full, selected_values

DENSE = {"num_experts": None, "moe_ffn_hidden_size": None}
LORY = {"lory_segment_length": len(PROMPT), "lory_inference": "prompt"}  # as tools/generate.py does
ODD = {
    "moe_layer_freq": "[0]+[1]",
    "untie_embeddings_and_output_weights": True,
    "kv_channels": 12,
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "rotary_base": 1_000_000,
    "use_rope_scaling": True,
    "rope_scaling_factor": 4.0,
}
FREE = {"moe_zero_experts": 1, "moe_copy_experts": 1, "moe_constant_experts": 1}
#: Options of the run.
RUNS = {
    name: options(name)
    for name in (
        "topk",
        "topk, one expert",
        "topk, sigmoid, groups, bias, shared expert",
        "topk, large router, factorized W_g, global loss",
        "relu",
        "expert_choice",
        "aoe",
        "aoe, by bias",
        "aoe, probs over all",
        "aoe_expert_choice",
        "threshold",
        "aoe_threshold",
        "routing_free",
        "hash",
        "uoe",
        "topk, free experts",
        "aoe, free experts",
    )
} | {
    "hash, one expert, large router": options("hash")
    | {"moe_router_topk": 1, "moe_router_hidden_size": 12},
    "uoe, norms of SiLU": options("uoe") | {"uoe_norm_of": "silu", "moe_router_topk": 1},
    "uoe, norms of x W_g, weighed": options("uoe")
    | {"uoe_norm_of": "gate", "uoe_gate_routing": True, "uoe_routing_neurons": 5}
    | {"moe_shared_expert_intermediate_size": 32},
    "top_p, free experts": options("top_p") | FREE | {"moe_top_p": 0.9},
    "topk, a zero expert renormalizes": options("topk, free experts")
    | {"moe_zero_experts": 3, "moe_zero_expert_gate": "renormalize"},
    "topk, factorized W_g, sigmoid, bias, free experts": {"expert_selection": "topk"}
    | FREE
    | {
        "moe_gate_low_rank_size": 8,
        "moe_router_hidden_size": 12,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update": "error",
    },
    "aoe_threshold, gate of the margin": options("aoe_threshold")
    | {"aoe_threshold_gate": "sigmoid"},
    "top_p, capped": options("top_p") | {"moe_top_p": 0.9, "moe_inference_max_experts": 3},
    "top_p, renormalized": options("top_p, a moving p") | {"moe_inference_top_p": 0.7},
    "aoe_top_p": options("aoe_top_p") | {"moe_top_p": 0.8, "moe_top_p_strict": True},
    "aoe, odd": options("aoe") | ODD,
    "topk, norms of all heads, shared gate": options("expert_choice")
    | {"expert_selection": "topk", "qk_layernorm": True, "qk_layernorm_all_heads": True},
    "lory": options("lory") | LORY,
    "lory_prefix": options("lory_prefix") | {"lory_segment_length": 6},
    "dense": DENSE | {"qk_layernorm": True, "qk_layernorm_all_heads": True},
}
QUICK = (
    "topk, sigmoid, groups, bias, shared expert",
    "aoe, by bias",
    "top_p, capped",
    "aoe, odd",
    "lory",
    "threshold",
    "hash",
    "uoe",
    "topk, free experts",
    "aoe, free experts",
)


@pytest.fixture(scope="module")
def used(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The runs that the selected tests need, by name: folder, logits, generated tokens."""
    folder = tmp_path_factory.mktemp("runs")
    wanted = sorted(selected_values(request, "name", RUNS))
    runs = [(folder / str(n), RUNS[name]) for n, name in enumerate(wanted)]
    (results,) = run_distributed(1, save_runs, runs)
    return {
        name: (run, *result) for name, (run, _), result in zip(wanted, runs, results, strict=True)
    }


def _assert_same(model, logits, tokens):
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        found = model.eval()(prompt).logits[0]
        written = model.generate(
            prompt, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False
        )
    assert found.shape == logits.shape
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert written[0, len(PROMPT) :].tolist() == tokens


@pytest.mark.parametrize("name", rest_in_full(RUNS, *QUICK))
def test_logits_and_greedy_generation_are_the_runs(name, used, tmp_path):
    run, logits, tokens = used[name]
    folds = [False, True] if "aoe" in name or "factorized" in name else [False]
    for fold in folds:
        output = tmp_path / str(fold)
        done = export_run(run, output, architecture="own", fold=fold)
        assert done.architecture == "MoeParallelForCausalLM"
        model = AutoModelForCausalLM.from_pretrained(output)
        assert type(model) is hf.MoeParallelForCausalLM
        assert done.written.parameters == sum(
            parameter.numel()
            for parameter in {*model.parameters()}
            if parameter.is_floating_point()
        )
        _assert_same(model, logits, tokens)


PLAIN = {
    LlamaForCausalLM: DENSE | {"use_rope_scaling": True, "rotary_base": 1_000_000},
    Qwen2ForCausalLM: DENSE | {"add_qkv_bias": True},
    Qwen3ForCausalLM: DENSE | {"qk_layernorm": True, "kv_channels": 12},
    MixtralForCausalLM: options("topk"),
    Qwen3MoeForCausalLM: options("topk")
    | {"qk_layernorm": True, "moe_layer_freq": "[0]+[1]", "kv_channels": 12},
    OlmoeForCausalLM: options("topk")
    | {"qk_layernorm": True, "qk_layernorm_all_heads": True, "moe_router_pre_softmax": True},
    Qwen2MoeForCausalLM: options("topk")
    | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": True}
    | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True},
}


@pytest.mark.parametrize("kind", rest_in_full(PLAIN, MixtralForCausalLM, OlmoeForCausalLM))
def test_topk_runs_become_plain_architectures_and_back(kind, tmp_path):
    run, output, again = (tmp_path / name for name in ("run", "exported", "again"))
    (((logits, tokens),),) = run_distributed(1, save_runs, [(run, PLAIN[kind])])
    assert export_run(run, output).architecture == kind.__name__
    assert not list(output.glob("*.py"))
    model = AutoModelForCausalLM.from_pretrained(output)
    assert type(model) is kind
    _assert_same(model, logits, tokens)
    # transformers writes the same names, so nothing was renamed or left at random.
    model.save_pretrained(again)
    one, other = (load_file(folder / "model.safetensors") for folder in (output, again))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    is_dense = PLAIN[kind].get("num_experts", 4) is None
    assert any(".experts.3." in name for name in one) is not is_dense


@pytest.mark.parametrize(
    "layouts",
    [
        [{"expert_model_parallel_size": 2, "aoe_gather_w_down": True}],
        pytest.param(
            [
                {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
                {"pipeline_model_parallel_size": 2},
                {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1,
                 "num_layers": 4},
            ],
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_any_layout_gives_the_same_files(layouts, tmp_path):
    """The initial weights are those of one process in every layout."""
    # The values that `_disturb` gives a bias depend on which part of it a rank has.
    odd = options("aoe, by bias") | ODD | {"kv_channels": None, "add_qkv_bias": False}
    for number, layout in enumerate(layouts):
        shape = {"num_layers": layout["num_layers"]} if "num_layers" in layout else {}
        shape |= {"moe_layer_freq": "[0]+[1]*3"} if shape else {}
        alone, spread = tmp_path / f"alone{number}", tmp_path / f"spread{number}"
        run_distributed(1, save_runs, [(alone, odd | shape)])
        run_distributed(2, save_runs, [(spread, odd | layout | shape)])
        for run in (alone, spread):
            export_run(run, run / "exported")
        one, other = (load_file(run / "exported/model.safetensors") for run in (alone, spread))
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "my"
    run_distributed(1, save_runs, [(folder, options("aoe, by bias"))])
    return folder


def test_files_of_limited_size(run, tmp_path):
    export_run(run, tmp_path / "one")
    export_run(run, tmp_path / "several", file_bytes=9_000, dtype="bfloat16")
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    whole = load_file(tmp_path / "one/model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    sizes = 0
    for file in files:
        with safe_open(tmp_path / "several" / file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 9_000 or len(tensors) == 1
        sizes += size
        for name, tensor in tensors.items():
            of_bias = name.endswith("expert_bias")
            assert tensor.dtype == (torch.float32 if of_bias else torch.bfloat16)
            assert torch.equal(tensor, whole[name].to(tensor.dtype))
    assert index["metadata"]["total_size"] == sizes
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "several", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.gate.expert_bias.dtype == torch.float32


@pytest.mark.full
def test_an_export_of_a_run_in_bf16_has_its_fp32_masters(tmp_path):
    run = tmp_path / "run"
    sizes = SMALL | STRONG | options("aoe, by bias") | {"save": run}
    ((logits, tokens),) = run_distributed(1, train_in_bf16, sizes | small_data(tmp_path))
    stored = {}
    for dtype in ("float32", "auto"):
        for fold in (False, True):
            output = tmp_path / f"{dtype}{fold}"
            assert export_run(run, output, dtype=dtype, fold=fold).written.dtype == (
                "float32" if dtype == "float32" else "bfloat16"
            )
            stored[dtype, fold] = load_file(output / "model.safetensors")
        if dtype == "float32":
            _assert_same(AutoModelForCausalLM.from_pretrained(output), logits, tokens)
    for fold in (False, True):
        for name, tensor in stored["auto", fold].items():
            assert torch.equal(tensor, stored["float32", fold][name].to(tensor.dtype)), name
    # They differ from the rounded weights, in which the run computed.
    assert any(
        not torch.equal(tensor, tensor.bfloat16().float())
        for tensor in stored["float32", False].values()
    )
