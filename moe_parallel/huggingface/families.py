"""The plain architectures of transformers that our dense and top-k models equal.

A family is one object: which options of ours it has, its configuration both ways, and its tensors
both ways. Nothing here needs transformers, a model, or a world.

    family = family_of_folder(fields)             # import
    config = make_config(options_of(family, fields))

    family = family_of_model(config)              # export; InputError: none is equal
    config_json = fields_of(family, config, vocab_size, dtype="bfloat16", eos_token_id=2)

    for place in family.places(config, vocab_size):
        part = place.form.join([theirs[name] for name in place.names])      # import
        theirs |= zip(place.names, place.form.split(part))                  # export
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.huggingface.fields import Fields
from moe_parallel.huggingface.places import ExpertNames, TensorPlace, plain
from moe_parallel.systems import TopKSelection


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
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_layernorm=True,
        may_slide=True,
        experts=_QWEN,
    ),
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
    model_type = fields.text("model_type")
    if model_type is None:
        raise InputError(f"{fields.file}: it has no model_type: it must be one of {known}")
    for family in FAMILIES:
        if family.model_type == model_type:
            architectures = fields.values.get("architectures")
            if architectures not in (None, [family.architecture]):
                raise fields.wrong("architectures", f"[{family.architecture}], a language model")
            return family
    raise InputError(f"{fields.file}: model_type is {model_type[:40]}: it must be one of {known}")


def family_of_model(config: Config) -> Family:
    """The family that computes the same as a model. Raises InputError if there is none."""
    lacking = []
    for family in FAMILIES:
        lack = family.lacks(config)
        if lack is None:
            return family
        if (family.experts is None) == (config.moe.num_experts is None):
            lacking.append(f"{family.architecture} has no {lack}")
    raise InputError(f"no plain architecture computes the same: {'; '.join(lacking)}")
