"""Each family's configuration and tensors, to ours and back."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from moe_parallel.huggingface.families import (
    FAMILIES,
    Family,
    Fields,
    family_of_folder,
    fields_of,
    options_of,
)
from tests.huggingface.models import LLAMA3, MODELS, SIZES, build
from tests.tiers import rest_in_full


def family_of_model(config: Any) -> Family:
    """The one that an export takes. AssertionError: none is equal."""
    lacks = {each: each.lacks(config) for each in FAMILIES}
    equal = [each for each, lack in lacks.items() if lack is None]
    assert equal, "; ".join(
        f"{family.architecture} has no {lack}" for family, lack in lacks.items()
    )
    return equal[0]


EXPERTS = {"num_experts": 4, "ffn_hidden_size": 48}
HEADS = {"num_attention_heads": 4, "hidden_size": 32}
QK = {"qk_layernorm": True}
WHOLE = {"moe_router_pre_softmax": True}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}


def _fields(model_type: str, **changes: Any) -> Fields:
    return Fields(
        Path("config.json"), {"model_type": model_type} | SIZES | MODELS[model_type] | changes
    )


@pytest.mark.parametrize(
    ("options", "architecture"),
    [
        (HEADS, "LlamaForCausalLM"),
        (HEADS | {"add_qkv_bias": True}, "Qwen2ForCausalLM"),
        (HEADS | QK, "Qwen3ForCausalLM"),
        (HEADS | EXPERTS, "MixtralForCausalLM"),
        (HEADS | EXPERTS | SHARED | {"add_qkv_bias": True}, "Qwen2MoeForCausalLM"),
        (HEADS | EXPERTS | QK | WHOLE | {"kv_channels": 10}, "Qwen3MoeForCausalLM"),
        (HEADS | EXPERTS | QK | {"moe_router_topk": 1}, "Qwen3MoeForCausalLM"),
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
        (QK | {"qk_layernorm_all_heads": True}, "LlamaForCausalLM has no --qk-layernorm true"),
        (EXPERTS | {"expert_selection": "aoe"}, "Mixtral.* has no --expert-selection aoe"),
        (EXPERTS | {"moe_layer_freq": "2"}, "MixtralForCausalLM has no --moe-layer-freq 2"),
        (EXPERTS | {"moe_expert_capacity_factor": 1.0}, "no --moe-expert-capacity-factor 1.0"),
        (
            EXPERTS | SHARED | {"moe_shared_expert_gate": False},
            "Qwen2MoeForCausalLM has no --moe-shared-expert-gate false",
        ),
    ],
)
def test_no_architecture_computes_the_same(options: Any, lacking: str) -> None:
    with pytest.raises(AssertionError, match=lacking):
        family_of_model(make_config(HEADS | options))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {}, "model_type is gpt2: it must be one of llama, qwen2, qwen3, mixtral"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only silu is known"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "type is 'linear': only"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}},
            "high_freq_factor is 8.0: only 4.0 is known",
        ),
        ("llama", {"hidden_size": None}, "it has no hidden_size"),
        ("llama", {"quantization_config": {}}, "quantization_config is {}: quantized weights"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1 .* cannot be imported"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers is .* a list of integers"),
    ],
)
def test_another_model_is_refused(model_type: Any, changes: Any, message: str) -> None:
    values = SIZES | MODELS.get(str(model_type), {}) | {"model_type": model_type} | changes
    fields = Fields(Path("config.json"), values)
    with pytest.raises(InputError, match=f"config.json: {message}"):
        options_of(family_of_folder(fields), fields)


LINEAR = {"rope_type": "linear", "factor": 2.0}
#: Fields of which each changes the logits of a family at least.
CHANGES: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 0.1},
    {"is_causal": False},
    {"clip_qkv": 0.1},
    {"norm_topk_prob": True},
    {"norm_topk_prob": False},
    {"num_experts_per_tok": 1},
    {"tie_word_embeddings": True},
    {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}},
    {"sliding_window": 3},
    {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0},
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 77.0, "rope_parameters": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_parameters": LINEAR},
    {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}},
    {"rope_scaling": LINEAR},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LLAMA3 | {"factor": 2.0}, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("model_type", rest_in_full(MODELS, "mixtral", "qwen2"))
@torch.no_grad()
def test_a_field_that_changes_the_logits_is_used_or_refused_by_name(model_type: str) -> None:
    model = build(model_type)
    values = json.loads(model.config.to_json_string(use_diff=False))
    tokens = torch.arange(12)[None]
    changed = []
    for change in CHANGES:
        try:
            config = type(model.config).from_dict(copy.deepcopy(values | change))
            other = type(model)._from_config(config, attn_implementation="eager").eval()
            other.load_state_dict(model.state_dict())
            logits = other(tokens).logits
        except Exception:
            continue  # not for this family
        if (logits - model(tokens).logits).abs().max() < 1e-5:
            continue
        changed.append(change)
        fields, own = (Fields(Path("config.json"), each) for each in (values | change, values))
        family = family_of_folder(own)
        try:
            assert options_of(family, fields) != options_of(family, own), change
        except InputError as error:
            names = [*change, *(key for part in change.values() if isinstance(part, dict)
                                for key in part)]  # fmt: skip
            assert any(f"{name} is" in str(error) for name in names), error
    assert len(changed) >= 8


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": LLAMA3}, None),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_theta": 300.0}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 200.0}},
            None,
        ),
        ({"rope_scaling": LINEAR, "rope_parameters": LLAMA3}, "rope_type is 'linear'"),
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}, "original_max"),
        (
            {"rope_parameters": {k: v for k, v in LLAMA3.items() if "original" not in k}},
            "original_max_position_embeddings is 64",
        ),
    ],
)
def test_the_angles_are_those_of_transformers(fields: dict[str, Any], refused: str | None) -> None:
    def angles(values: dict[str, Any]) -> torch.Tensor:
        config = transformers.LlamaConfig.from_dict(copy.deepcopy(values))
        return LlamaRotaryEmbedding(config).inv_freq

    given = _fields("llama", **fields)
    family = family_of_folder(given)
    if refused is not None:
        with pytest.raises(InputError, match=refused):
            options_of(family, given)
        return
    written = fields_of(family, make_config(options_of(family, given)), 96)
    for new in ({}, {"rope_scaling": None}):  # earlier versions read the one, later ones the other
        assert torch.equal(angles(written | new), angles(dict(given.values)))


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
