"""The plain architectures of transformers that our dense and top-k models equal.

A family is one object: which options of ours it has, its configuration both ways, and its tensors
both ways. Nothing here needs transformers, a model, or a world.

    family = family_of_folder(fields)             # import
    config = make_config(options_of(family, fields))

    config_json = fields_of(family, config, vocab_size)             # export
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_parallel.config import Config, ModelConfig
from moe_parallel.config.message import shown
from moe_parallel.errors import InputError
from moe_parallel.huggingface.tensors import ExpertNames, TensorPlace, plain
from moe_parallel.reading import read_json
from moe_parallel.systems import TopKSelection

#: Stands for "the field must be there".
NEEDED = object()
_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "an object",
}


@dataclass(frozen=True)
class Fields:
    """The fields of a config.json. Each method raises InputError for a wrong value.

    A field that is null counts as absent, as in transformers.
    """

    file: Path
    values: Mapping[str, Any]

    def get(self, name: str, kind: type, default: Any = NEEDED, least: int | None = None) -> Any:
        """A value of this type; an integer counts as a float."""
        value: Any = self.values.get(name)
        if value is None:
            if default is NEEDED:
                raise InputError(
                    f"{self.file}: it has no {name}: take the model's own {self.file.name}"
                )
            return default
        if kind is float and type(value) is int:
            value = float(value)
        too_small = least is not None and type(value) is int and value < least
        if type(value) is not kind or too_small:
            raise self.wrong(name, _KINDS[kind] + (f" of at least {least}" * (least is not None)))
        return value

    def integer(self, *names: str, default: Any = NEEDED, least: int = 1) -> Any:
        """An integer of at least `least`: the first of `names` that is there."""
        there = [name for name in names if self.values.get(name) is not None]
        return self.get((there or names)[0], int, default, least)

    def integers(self, name: str) -> list[int]:
        """A list of integers; [] if it is absent. One integer counts as a list of it."""
        value = self.values.get(name)
        several = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in several):
            raise self.wrong(name, "a list of integers")
        return several

    def refuse(self, name: str, accepted: tuple[Any, ...], why: str) -> None:
        """Raise InputError unless the field is absent or one of `accepted`."""
        value = self.values.get(name)
        if value is not None and value not in accepted:
            raise InputError(f"{self.file}: {name} is {shown(value)}: {why}")

    def wrong(self, name: str, expected: str) -> InputError:
        """The error of a field whose value is not as expected."""
        return InputError(
            f"{self.file}: {name} is {shown(self.values.get(name))}: it must be {expected}"
        )


def read_fields(file: Path) -> Fields:
    """The fields of a config.json. Raises InputError for a file that is missing or damaged."""
    if not file.exists():
        raise InputError(f"{file}: there is no such file: name a folder that save_pretrained wrote")
    values = read_json(file, ": fetch it again")
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a configuration: it is not a JSON object")
    return Fields(file, values)


@dataclass(frozen=True)
class Family:
    """A plain architecture of transformers.

    The fields of its config.json that all families share are read in `configuration.py`. This
    record has what differs.
    """

    model_type: str
    architecture: str
    rope_theta: int = 10_000  # if config.json does not say
    norm_epsilon: float = 1e-6  # the same
    head_width: bool = True  # head_dim may differ from hidden_size / num_attention_heads
    default_head_width: int | None = None  # if config.json does not say; None: that quotient
    qk_layernorm: bool = False
    qk_layernorm_all_heads: bool = False
    qkv_bias: tuple[bool, ...] = (False,)  # which it may have, the default first
    qkv_bias_field: str | None = None  # the field that says so
    may_slide: bool = False  # use_sliding_window says whether sliding_window counts
    experts: Experts | None = None  # None: a dense model

    def places(self, config: Config, vocab_size: int) -> Iterator[TensorPlace]:
        """The tensors of a model of this family, ours and theirs, layer by layer.

        `vocab_size`: of config.json; ours is padded to a multiple.
        """
        return plain(config, vocab_size, self.experts.names if self.experts else ExpertNames())

    def lacks(self, config: Config) -> str | None:
        """The first option of a model that this family does not have; None: it is equal."""
        model = config.model
        quotient = model.hidden_size // model.num_attention_heads
        if not self.head_width and model.head_width != quotient:
            return f"--kv-channels {model.head_width}"
        for name in ("qk_layernorm", "qk_layernorm_all_heads"):
            if getattr(model, name) != getattr(self, name):
                return f"--{name.replace('_', '-')} {str(getattr(model, name)).lower()}"
        if model.add_qkv_bias not in self.qkv_bias:
            return f"--add-qkv-bias {str(model.add_qkv_bias).lower()}"
        if (config.moe.num_experts is None) != (self.experts is None):
            return f"--num-experts {config.moe.num_experts}".lower()
        return None if self.experts is None else self.experts.lacks(config)


@dataclass(frozen=True)
class Experts:
    """What the layers of experts of a family have."""

    number: tuple[str, ...]  # the fields that give it; the first is written
    width: str  # the field that gives the width of an expert
    default_number: int
    names: ExpertNames = ExpertNames()
    renormalizes: bool | None = None  # the chosen probabilities; None: norm_topk_prob says so
    dense_layers: bool = False  # mlp_only_layers and decoder_sparse_step
    shared: bool = False  # a shared expert with a gate
    jitter: bool = False  # router_jitter_noise
    aux_loss_coeff: float = 0.001  # if config.json does not say

    def lacks(self, config: Config) -> str | None:
        """The first option of a model that these experts do not have; None: they are equal."""
        selection = config.selection
        if type(selection) is not TopKSelection:  # a subclass may have another rule
            return f"--expert-selection {selection.system}"
        expected = TopKSelection()
        for name in (
            "moe_router_score_function",
            "moe_router_num_groups",
            "moe_router_enable_expert_bias",
            "moe_router_hidden_size",
            "moe_gate_low_rank_size",
            "moe_router_force_routing",
            "moe_router_force_load_balancing",
            "moe_zero_experts",
            "moe_copy_experts",
            "moe_constant_experts",
        ):
            if getattr(selection, name) != getattr(expected, name):
                return f"--{name.replace('_', '-')} {str(getattr(selection, name)).lower()}"
        if config.moe.moe_expert_capacity_factor is not None:
            return f"--moe-expert-capacity-factor {config.moe.moe_expert_capacity_factor}"
        if self.renormalizes is not None and self.renormalizes != selection.renormalizes:
            if selection.moe_router_topk == 1:
                return "--moe-router-topk 1"
            return f"--moe-router-pre-softmax {str(selection.moe_router_pre_softmax).lower()}"
        if not (self.dense_layers or all(config.moe_layers)):
            return f"--moe-layer-freq {config.moe.moe_layer_freq}"
        width = selection.moe_shared_expert_intermediate_size
        if (width is not None) != self.shared:
            return f"--moe-shared-expert-intermediate-size {width}".lower()
        if self.shared and not selection.moe_shared_expert_gate:
            return "--moe-shared-expert-gate false"
        return None


_QWEN = Experts(
    ("num_experts", "num_local_experts"), "moe_intermediate_size", 128, dense_layers=True
)

#: In the order in which an export tries them.
FAMILIES: tuple[Family, ...] = (
    Family("llama", "LlamaForCausalLM"),
    Family("qwen2", "Qwen2ForCausalLM", head_width=False, qkv_bias=(True,), may_slide=True),
    Family("qwen3", "Qwen3ForCausalLM", default_head_width=128, qk_layernorm=True, may_slide=True),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        rope_theta=1_000_000,
        norm_epsilon=1e-5,
        experts=Experts(
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            default_number=8,
            names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
            renormalizes=True,
            jitter=True,
        ),
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        head_width=False,
        qkv_bias=(True, False),
        qkv_bias_field="qkv_bias",
        may_slide=True,
        experts=replace(_QWEN, default_number=60, shared=True),
    ),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_layernorm=True, may_slide=True, experts=_QWEN),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        norm_epsilon=1e-5,
        head_width=False,
        qk_layernorm=True,
        qk_layernorm_all_heads=True,
        experts=Experts(
            ("num_experts", "num_local_experts"),
            "intermediate_size",
            default_number=64,
            aux_loss_coeff=0.01,
        ),
    ),
)


def family_of_folder(fields: Fields) -> Family:
    """The family that a config.json names. Raises InputError for another one."""
    known = ", ".join(family.model_type for family in FAMILIES)
    model_type = fields.get("model_type", str, None)
    if model_type is None:
        raise InputError(f"{fields.file}: it has no model_type: it must be one of {known}")
    for family in FAMILIES:
        if family.model_type == model_type:
            architectures = fields.values.get("architectures")
            if architectures not in (None, [family.architecture]):
                raise fields.wrong("architectures", f"[{family.architecture}], a language model")
            return family
    raise InputError(f"{fields.file}: model_type is {model_type[:40]}: it must be one of {known}")


#: Fields that change what a model computes in a way that ours does not: the values that do not.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "only silu is known"),
    "attention_bias": ((False,), "a bias of the output projection is not known"),
    "mlp_bias": ((False,), "biases of feed-forward layers are not known"),
    "clip_qkv": ((), "clipped queries, keys and values are not known"),
    "quantization_config": ((), "quantized weights are not known: save the model in bf16"),
    "partial_rotary_factor": ((1, 1.0), "every channel of a head must be turned"),
    "is_causal": ((True,), "tokens that see later ones are not known"),
    "per_layer_config": (({},), "layers of different shapes are not known"),
    "transformers_weights": ((), "the weights must be in the files of save_pretrained"),
}

#: The numbers of Llama 3.1's RoPE that Megatron-Core has as constants.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def options_of(family: Family, fields: Fields) -> dict[str, Any]:
    """Our options, by name as in `make_config`, for a config.json of a family.

    Raises InputError for a model that ours cannot compute.
    """
    for name, (accepted, why) in _REFUSED.items():
        fields.refuse(name, accepted, why)
    vocab_size = fields.integer("vocab_size")
    heads = fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers")
    length = _length(family, fields)
    if layers > 10_000:  # before lists of the layers are made
        raise fields.wrong("num_hidden_layers", "at most 10000")
    options = {
        "num_layers": layers,
        "hidden_size": fields.integer("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": fields.integer("num_key_value_heads", default=heads),
        "kv_channels": _head_width(family, fields),
        "qk_layernorm": family.qk_layernorm,
        "qk_layernorm_all_heads": family.qk_layernorm_all_heads,
        "add_qkv_bias": _qkv_bias(family, fields),
        "ffn_hidden_size": fields.integer("intermediate_size"),
        "norm_epsilon": fields.get("rms_norm_eps", float, family.norm_epsilon),
        **_rope(family, fields),
        "untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", bool, False),
        # No padding, which would add numbers to the softmax: any power of 2 up to 128 that divides.
        "make_vocab_size_divisible_by": math.gcd(vocab_size, 128),
        "vocab_size": vocab_size,
        "seq_length": length,
        "max_position_embeddings": length,
        "bf16": fields.get("dtype", str, fields.get("torch_dtype", str, None)) == "bfloat16",
    }
    std = fields.get("initializer_range", float, 0.02)
    if std > 0:
        options["init_method_std"] = std
    if family.experts is not None:
        options |= _experts(family.experts, fields, layers)
    return options


def fields_of(family: Family, config: Config, vocab_size: int) -> dict[str, Any]:
    """The config.json of a model of ours that `family` computes, without dtype and tokens.

    `vocab_size`: of the tensors that are written, without our padding.
    """
    model = config.model
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "hidden_act": "silu",
        "max_position_embeddings": config.positions,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        # transformers 5 reads rope_parameters, earlier versions the others.
        **rope_fields(model),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
        "pad_token_id": None,
    }
    if family.head_width:
        fields["head_dim"] = model.head_width
    if family.qkv_bias_field is not None:
        fields[family.qkv_bias_field] = model.add_qkv_bias
    if family.experts is not None:
        fields |= _expert_fields(family.experts, config)
    return fields


def _head_width(family: Family, fields: Fields) -> int | None:
    """--kv-channels; None: the quotient of the sizes."""
    width: int | None = fields.integer("head_dim", default=family.default_head_width)
    quotient, rest = divmod(fields.integer("hidden_size"), fields.integer("num_attention_heads"))
    if width is None or (width == quotient and rest == 0):
        return None
    return width


def _qkv_bias(family: Family, fields: Fields) -> bool:
    default = family.qkv_bias[0]
    field = family.qkv_bias_field
    return default if field is None else fields.get(field, bool, default)


def _rope(family: Family, fields: Fields) -> dict[str, Any]:
    """The options of RoPE. A rope_scaling that is not empty wins over rope_parameters."""
    scaling = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = Fields(fields.file, fields.get(scaling, dict, {}))
    for name in ("rope_type", "type"):
        rope.refuse(name, ("default", "llama3"), "only default and llama3 are known")
    rope.refuse("partial_rotary_factor", (1, 1.0), "every channel of a head must be turned")
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, family.rope_theta))
    if theta < 1 or theta != int(theta):
        raise InputError(f"{fields.file}: rope_theta is {theta}: it must be a whole number")
    options: dict[str, Any] = {"rotary_base": int(theta)}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if rope.get("rope_type", str, rope.get("type", str, None)) == "llama3":
        # As in transformers: a field of config.json itself wins, and max_position_embeddings stands
        # in for a missing one.
        length = "original_max_position_embeddings"
        given = {name: value for name, value in fields.values.items() if name == length}
        rope = Fields(fields.file, {length: _positions(fields)} | {**rope.values} | given)
        for name, value in _LLAMA3.items():
            rope.get(name, float)
            rope.refuse(name, (value,), f"only {value} is known")
        options |= {"use_rope_scaling": True, "rope_scaling_factor": rope.get("factor", float)}
        known |= {"factor", *_LLAMA3}
    for name in sorted(rope.values.keys() - known):
        raise rope.wrong(name, "absent: it is not known")
    return options


def rope_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of RoPE, for transformers 5 and for earlier versions."""
    theta = {"rope_theta": float(model.rotary_base)}
    if not model.use_rope_scaling:
        return theta | {"rope_parameters": {"rope_type": "default"} | theta}
    scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor} | _LLAMA3
    return theta | {"rope_scaling": scaling, "rope_parameters": scaling | theta}


def _positions(fields: Fields) -> int:
    length: int = fields.integer("max_position_embeddings", default=2048)
    return length


def _length(family: Family, fields: Fields) -> int:
    """--seq-length: the positions that the model knows, or fewer, so that no window shows."""
    kinds = fields.values.get("layer_types") or []
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.wrong("layer_types", "of full_attention and sliding_attention")
    windows = [_positions(fields), fields.integer("attention_chunk_size", default=None)]
    if not family.may_slide or fields.get("use_sliding_window", bool, False):
        by_default = 4096 if family.may_slide and "sliding_window" not in fields.values else None
        windows.append(fields.integer("sliding_window", default=by_default))
    return min(window for window in windows if window is not None)


def _experts(experts: Experts, fields: Fields, layers: int) -> dict[str, Any]:
    k = fields.integer("num_experts_per_tok")
    normed = experts.renormalizes
    if normed is None:
        normed = fields.get("norm_topk_prob", bool, False)
    if k == 1 and normed:
        raise InputError(
            f"{fields.file}: num_experts_per_tok is 1 and its probability is renormalized to 1, "
            "so its router would not learn: it cannot be imported"
        )
    options = {
        "expert_selection": "topk",
        "num_experts": fields.integer(*experts.number, default=experts.default_number),
        "moe_ffn_hidden_size": fields.integer(experts.width),
        "moe_router_topk": k,
        "moe_router_pre_softmax": not normed,
        "moe_aux_loss_coeff": fields.get("router_aux_loss_coef", float, experts.aux_loss_coeff),
    }
    if experts.jitter:
        options["moe_input_jitter_eps"] = fields.get("router_jitter_noise", float, 0.0)
    if experts.dense_layers:
        options["moe_layer_freq"] = _layer_freq(fields, layers)
    if experts.shared:
        options["moe_shared_expert_intermediate_size"] = fields.integer(
            "shared_expert_intermediate_size"
        )
        options["moe_shared_expert_gate"] = True
    return options


def _layer_freq(fields: Fields, layers: int) -> str:
    """--moe-layer-freq: a layer is dense if it is listed, or if its number is not a multiple."""
    step, dense = fields.integer("decoder_sparse_step", default=1), fields.integers(_DENSE)
    moe = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    if not any(moe):
        raise InputError(
            f"{fields.file}: decoder_sparse_step and {_DENSE} leave no layer of experts: import a "
            "dense model under its own model_type"
        )
    return "1" if all(moe) else str(moe).replace(" ", "")


_DENSE = "mlp_only_layers"


def _expert_fields(experts: Experts, config: Config) -> dict[str, Any]:
    selection = config.selection
    assert isinstance(selection, TopKSelection)
    fields: dict[str, Any] = {
        experts.number[0]: config.num_experts,
        experts.width: config.expert_width,
        "num_experts_per_tok": selection.moe_router_topk,
        "router_aux_loss_coef": selection.moe_aux_loss_coeff,
        "output_router_logits": False,
    }
    if experts.renormalizes is None:
        fields["norm_topk_prob"] = selection.renormalizes
    if experts.jitter:
        fields["router_jitter_noise"] = selection.moe_input_jitter_eps
        fields["sliding_window"] = None
    if experts.dense_layers:
        fields["decoder_sparse_step"] = 1
        fields[_DENSE] = [layer for layer, moe in enumerate(config.moe_layers) if not moe]
        fields["use_sliding_window"] = False
    if experts.shared:
        fields["shared_expert_intermediate_size"] = selection.moe_shared_expert_intermediate_size
    return fields
