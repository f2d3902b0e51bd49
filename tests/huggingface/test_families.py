"""Each family's configuration and tensors, to ours and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.huggingface.configuration import fields_of, options_of
from moe_parallel.huggingface.families import FAMILIES, family_of_folder, family_of_model
from moe_parallel.huggingface.fields import Fields
from moe_parallel.training.checkpoint.whole import read_in_groups, tensor_entries
from tests.huggingface.imported import run_of
from tests.huggingface.models import MODELS, SIZES, build, save

EXPERTS = {"num_experts": 4, "ffn_hidden_size": 48}
HEADS = {"num_attention_heads": 4, "hidden_size": 32}
QK = {"qk_layernorm": True}
WHOLE = {"moe_router_pre_softmax": True}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}


def _fields(model_type: str, **changes: Any) -> Fields:
    return Fields(
        Path("config.json"), {"model_type": model_type} | SIZES | MODELS[model_type] | changes
    )


def test_every_family_has_a_model_here() -> None:
    assert {family.model_type for family in FAMILIES} == set(MODELS)
    for family in FAMILIES:
        assert hasattr(transformers, family.architecture)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_round_trip_is_the_same_to_the_bit(model_type: str, tmp_path: Path) -> None:
    """In bf16, with rows of padding: into a checkpoint, and by the inverse into a folder again."""
    saved = save(build(model_type).to(torch.bfloat16), tmp_path / "theirs")
    run = run_of(saved, tmp_path / "run", ["--make-vocab-size-divisible-by", "64"])
    checkpoint = run / "iter_0000000"
    fields = Fields(Path("config.json"), json.loads((saved.folder / "config.json").read_text()))
    family = family_of_folder(fields)
    config = make_config(options_of(family, fields) | {"make_vocab_size_divisible_by": 64})
    assert family_of_model(config) is family

    entries = tensor_entries(checkpoint)
    ((ours,),) = list(read_in_groups(entries, entries, checkpoint))
    assert ours["embedding.word_embeddings.weight"].shape == (128, 32)
    assert not ours["embedding.word_embeddings.weight"][96:].any()
    theirs: dict[str, torch.Tensor] = {}
    for place in family.places(config, 96):
        begin_to_end = zip(place.offset, place.sizes, strict=True)
        part = ours[place.key][tuple(slice(begin, begin + size) for begin, size in begin_to_end)]
        theirs |= zip(place.names, place.form.split(part), strict=True)
    original = load_file(saved.folder / "model.safetensors")
    assert theirs.keys() == original.keys()
    for name, tensor in original.items():
        assert tensor.dtype == theirs[name].dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16)), name

    back = tmp_path / "back"
    back.mkdir()
    save_file(theirs, back / "model.safetensors", metadata={"format": "pt"})
    written = fields_of(family, config, 96, dtype="bfloat16")
    (back / "config.json").write_text(json.dumps(written))
    again = transformers.AutoModelForCausalLM.from_pretrained(back, attn_implementation="eager")
    assert type(again).__name__ == family.architecture
    first = transformers.AutoModelForCausalLM.from_pretrained(
        saved.folder, attn_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(again(saved.tokens_BS).logits, first(saved.tokens_BS).logits)
    _same_configuration(first.config.to_dict(), again.config.to_dict())


def _same_configuration(first: dict[str, Any], again: dict[str, Any]) -> None:
    """Equal, except for what has no counterpart or says the same in other words."""
    if first.get("head_dim") is None:  # the quotient, which is written
        again.pop("head_dim", None)
        first.pop("head_dim", None)
    for name in ("_name_or_path", "use_cache", "transformers_version", "rope_theta"):
        first.pop(name, None)
        again.pop(name, None)
    assert {name: value for name, value in again.items() if first.get(name) != value} == {}


@pytest.mark.parametrize(
    ("options", "architecture"),
    [
        (HEADS, "LlamaForCausalLM"),
        (HEADS | {"kv_channels": 10}, "LlamaForCausalLM"),
        (HEADS | {"add_qkv_bias": True}, "Qwen2ForCausalLM"),
        (HEADS | QK, "Qwen3ForCausalLM"),
        (HEADS | EXPERTS, "MixtralForCausalLM"),
        (HEADS | EXPERTS | {"moe_ffn_hidden_size": 16}, "MixtralForCausalLM"),
        (HEADS | EXPERTS | {"moe_z_loss_coeff": 0.1}, "MixtralForCausalLM"),
        (HEADS | EXPERTS | SHARED, "Qwen2MoeForCausalLM"),
        (HEADS | EXPERTS | SHARED | {"add_qkv_bias": True}, "Qwen2MoeForCausalLM"),
        (HEADS | EXPERTS | QK, "Qwen3MoeForCausalLM"),
        (HEADS | EXPERTS | QK | WHOLE | {"kv_channels": 10}, "Qwen3MoeForCausalLM"),
        (HEADS | EXPERTS | QK | {"moe_router_topk": 1}, "Qwen3MoeForCausalLM"),
        (HEADS | EXPERTS | QK | {"moe_layer_freq": "2"}, "Qwen3MoeForCausalLM"),
        (HEADS | EXPERTS | QK | {"qk_layernorm_all_heads": True}, "OlmoeForCausalLM"),
    ],
)
def test_the_architecture_that_computes_the_same(options: Any, architecture: str) -> None:
    family = family_of_model(make_config(options))
    assert family.architecture == architecture
    # What is written is read back to the same model.
    config = make_config(options)
    again = make_config(options_of(family, Fields(Path("x"), fields_of(family, config, 128))))
    assert family_of_model(again) is family
    assert (again.model.head_width, again.moe_layers) == (
        config.model.head_width,
        config.moe_layers,
    )
    for name in ("qk_layernorm", "qk_layernorm_all_heads", "add_qkv_bias", "query_groups"):
        assert getattr(again.model, name) == getattr(config.model, name)
    if config.moe.num_experts is not None:
        assert (again.num_experts, again.expert_width) == (4, config.expert_width)


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({"kv_channels": 10, "add_qkv_bias": True}, "Qwen2ForCausalLM has no --kv-channels 10"),
        (QK | {"add_qkv_bias": True}, "Qwen3ForCausalLM has no --add-qkv-bias true"),
        (QK | {"qk_layernorm_all_heads": True}, "LlamaForCausalLM has no --qk-layernorm true"),
        (EXPERTS | {"expert_selection": "aoe"}, "Mixtral.* has no --expert-selection aoe"),
        (EXPERTS | {"moe_router_topk": 1}, "MixtralForCausalLM has no --moe-router-topk 1"),
        (EXPERTS | WHOLE, "MixtralForCausalLM has no --moe-router-pre-softmax true"),
        (EXPERTS | {"moe_layer_freq": "2"}, "MixtralForCausalLM has no --moe-layer-freq 2"),
        (EXPERTS | {"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
        (EXPERTS | {"moe_expert_capacity_factor": 1.0}, "no --moe-expert-capacity-factor 1.0"),
        (
            EXPERTS | SHARED | {"moe_shared_expert_gate": False},
            "Qwen2MoeForCausalLM has no --moe-shared-expert-gate false",
        ),
    ],
)
def test_no_architecture_computes_the_same(options: Any, lacking: str) -> None:
    with pytest.raises(InputError, match=f"no plain architecture .*{lacking}"):
        family_of_model(make_config(HEADS | options))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {}, "model_type is gpt2: it must be one of llama, qwen2, qwen3, mixtral"),
        (None, {}, "it has no model_type"),
        (["llama"], {}, "model_type is .'llama'.: it must be a text"),
        ("llama", {"architectures": ["LlamaModel"]}, "architectures is .* a language model"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only silu is known"),
        ("llama", {"attention_bias": True}, "attention_bias is True: a bias of the output"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "type is 'linear': only"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn': only default"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "high_freq_factor": 8.0}},
            "high_freq_factor is 8.0: only 4.0 is known",
        ),
        ("llama", {"rope_theta": 10.5}, "rope_theta is 10.5: it must be a whole number"),
        ("llama", {"hidden_size": None}, "it has no hidden_size"),
        ("llama", {"hidden_size": "32"}, "hidden_size is '32': it must be an integer of at least"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps is 'x': it must be a number"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1: it must be true or false"),
        ("llama", {"quantization_config": {}}, "quantization_config is {}: quantized weights"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1 .* cannot be imported"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, ".* leave no layer of experts"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers is .* a list of integers"),
    ],
)
def test_another_model_is_refused(model_type: Any, changes: Any, message: str) -> None:
    values = SIZES | MODELS.get(str(model_type), {}) | {"model_type": model_type} | changes
    fields = Fields(Path("config.json"), values)
    with pytest.raises(InputError, match=f"config.json: {message}"):
        options_of(family_of_folder(fields), fields)


@pytest.mark.parametrize(
    ("model_type", "changes", "length"),
    [
        ("mixtral", {"sliding_window": None}, 64),
        ("mixtral", {"sliding_window": 20}, 20),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": False}, 64),
        ("qwen2", {"sliding_window": 20}, 64),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": True}, 20),
        ("qwen2", {"sliding_window": 200, "use_sliding_window": True}, 64),
    ],
)
def test_sequences_are_within_a_sliding_window(model_type: str, changes: Any, length: int) -> None:
    fields = _fields(model_type, **changes)
    assert options_of(family_of_folder(fields), fields)["seq_length"] == length


def test_what_config_json_leaves_out() -> None:
    """Defaults are those of transformers."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    few = {name: SIZES[name] for name in (*needed, "num_attention_heads")}
    more = {
        "mixtral": {"num_experts_per_tok": 2},
        "qwen2_moe": {"num_experts_per_tok": 4, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 40},
        "qwen3_moe": {"num_experts_per_tok": 8, "moe_intermediate_size": 16},
        "olmoe": {"num_experts_per_tok": 8},
    }
    for family in FAMILIES:
        given = few | more.get(family.model_type, {})
        if family.model_type != "llama":  # others have numbers of their own
            given["num_key_value_heads"] = 4
        theirs = transformers.AutoConfig.for_model(family.model_type, **given)
        fields = Fields(Path("x"), given | {"model_type": family.model_type})
        config = make_config(options_of(family, fields) | {"num_query_groups": 4})
        assert config.model.norm_epsilon == theirs.rms_norm_eps, family.model_type
        assert config.model.rotary_base == theirs.rope_parameters["rope_theta"]
        assert config.model.untie_embeddings_and_output_weights != theirs.tie_word_embeddings
        assert config.model.head_width == (getattr(theirs, "head_dim", None) or 8)
        if family.experts is not None:
            assert config.num_experts == theirs.num_experts
            assert config.selection.moe_aux_loss_coeff == theirs.router_aux_loss_coef  # type: ignore[attr-defined]
