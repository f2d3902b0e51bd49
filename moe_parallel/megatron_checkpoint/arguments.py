"""The arguments of Megatron-LM in its checkpoints, read as data only: our options both ways.

Megatron-LM pickles an argparse.Namespace, with enums and records of its own and of whoever changed
it. With Megatron-Core up to 0.18 it is in common.pt, since 0.19 among the tensors.
"""

from __future__ import annotations

import io
import math
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from moe_parallel.config import Config, make_config
from moe_parallel.config.config import selection_options
from moe_parallel.errors import InputError
from moe_parallel.huggingface.families import Fields
from moe_parallel.megatron import ARGUMENT, BIAS, FILE, OF_RUN
from moe_parallel.reading import MOST_BYTES, open_regular, parse_json
from moe_parallel.systems import TopKSelection
from moe_parallel.training.checkpoint.index import COMMON

_AMONG_TENSORS = "common_state"  # the key of what was in common.pt before


class _Object:
    """Stands for an object of any class that torch does not know as harmless."""

    def __new__(cls, *_: Any, **__: Any) -> _Object:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __repr__(self) -> str:
        return "an object"


def read_arguments(checkpoint: Path, index: Metadata) -> Fields | None:
    """The arguments with which a checkpoint was saved; None: it has none. Raises InputError."""
    file = checkpoint / COMMON
    place = index.storage_data.get(MetadataIndex(f"{_AMONG_TENSORS}/shard_0_1"))
    if file.exists():
        content = _bytes(file, 0, file.stat().st_size)
    elif place is not None:
        content = _bytes(checkpoint / place.relative_path, place.offset, place.length)
        file = checkpoint / _AMONG_TENSORS
    else:
        return None
    try:
        common = _plain_values(content)
        (common,) = common if isinstance(common, list) else [common]
        given = vars(common["args"]) if "args" in common else {}
        arguments = {name: _plain(value) for name, value in given.items()}
    except Exception as error:  # arbitrary bytes may cause any error
        reason = str(error).partition("\n")[0].partition(". ")[0][:80] or type(error).__name__
        raise InputError(
            f"{file} is not what Megatron-LM saves, and was not run ({reason}): copy it again"
        ) from None
    return Fields(file, arguments) if arguments else None


def _bytes(file: Path, offset: int, length: int) -> bytes:
    if length > MOST_BYTES:
        raise InputError(f"{file}: the arguments take more than {MOST_BYTES >> 20} MiB")
    with open_regular(file) as opened:
        opened.seek(offset)
        return opened.read(length)


def _plain_values(content: bytes) -> Any:
    """What torch.save wrote, with `_Object` for every class that is not one of torch's own."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > len(content):
            raise ValueError("it is compressed")
    names = get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    with safe_globals([(_Object, name) for name in names]):
        return torch.load(io.BytesIO(content), map_location="meta", weights_only=True)


def _plain(value: Any) -> Any:
    several = value if isinstance(value, list) else [value]
    plain = all(isinstance(each, bool | int | float | str | None) for each in several)
    return value if plain else _Object()


#: Arguments that change what a model computes in a way that ours does not: the values that do not.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "normalization": (("RMSNorm",), "only RMSNorm is known"),
    "layernorm_zero_centered_gamma": ((False,), "norm weights around 0 are not known"),
    "swiglu": ((True,), "only SwiGLU is known"),
    "activation_func_clamp_value": ((), "clamped activations are not known"),
    "glu_linear_offset": ((0, 0.0), "an offset in SwiGLU is not known"),
    "add_bias_linear": ((False,), "biases of linear layers are not known"),
    "apply_residual_connection_post_layernorm": ((False,), "residuals after norms are not known"),
    "position_embedding_type": (("rope",), "only rope is known"),
    "rotary_percent": ((1, 1.0), "every channel of a head must be turned"),
    "rotary_interleaved": ((False,), "the channels of a head must be turned by halves"),
    "rotary_seq_len_interpolation_factor": ((), "positions must not be interpolated"),
    "no_rope_freq": ((), "every layer must have rotary positions"),
    "multi_latent_attention": ((False,), "multi-latent attention is not known"),
    "attention_output_gate": ((False,), "a gate of the attention's output is not known"),
    "experimental_attention_variant": ((), "only softmax attention is known"),
    "linear_attention_freq": ((), "only softmax attention is known"),
    "softmax_type": (("vanilla",), "an offset in the softmax is not known"),
    "softmax_scale": ((), "only 1 / sqrt(width of a head) is known"),
    "window_size": ((), "sliding windows are not known"),
    "qk_l2_norm": ((False,), "only RMSNorm is known"),
    "mtp_num_layers": ((0,), "layers that predict several tokens are not known"),
    "is_hybrid_model": ((False,), "Mamba layers are not known"),
    "hybrid_layer_pattern": ((), "Mamba layers are not known"),
    "hybrid_override_pattern": ((), "Mamba layers are not known"),
    "heterogeneous_layers_config_path": ((), "layers of different shapes are not known"),
    "use_mup": ((False,), "the factors of muP are not known"),
    "moe_router_score_function": (("softmax", "sigmoid"), "only softmax and sigmoid are known"),
    "moe_router_topk_scaling_factor": ((1, 1.0), "scaled routing probabilities are not known"),
    "moe_apply_probs_on_input": ((False,), "probabilities must weight an expert's output"),
    "moe_latent_size": ((), "experts of another width than the model's are not known"),
    "moe_mlp_glu_interleave_size": ((), "interleaved rows of SwiGLU are not known"),
    "moe_shared_expert_glu_interleave_size": ((), "interleaved rows of SwiGLU are not known"),
}  # fmt: skip


#: Our options that Megatron-LM has under the same name, with the same values.
_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "qk_layernorm", "add_qkv_bias", "rotary_base", "use_rope_scaling",
    "untie_embeddings_and_output_weights", "init_method_std", "seq_length",
    "max_position_embeddings", "bf16",
)  # fmt: skip
_EXPERTS = (
    "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
)  # fmt: skip
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def options_of(fields: Fields, *, has_our_layers: bool = False) -> dict[str, Any]:
    """Our options, by name as in `make_config`. Raises InputError for a model that ours lacks.

    `has_our_layers`: the model was trained with --spec moe_parallel.megatron, and one of the
    arguments has its system.
    """
    for name, (accepted, why) in _REFUSED.items():
        fields.refuse(name, accepted, why)
    for name in ("hidden_size", "num_attention_heads", "ffn_hidden_size"):
        fields.integer(name)  # none of them may be a default
    if fields.integer("num_layers") > 10_000:  # before lists of the layers are made
        raise fields.wrong("num_layers", "at most 10000")
    given = {name: value for name, value in fields.values.items() if value is not None}
    options = {name: given[name] for name in _MODEL if name in given}
    options["norm_epsilon"] = given.get("layernorm_epsilon", given.get("norm_epsilon", 1e-5))
    if given.get("group_query_attention"):
        options["num_query_groups"] = fields.integer("num_query_groups")
    if given.get("use_rope_scaling"):
        fields.refuse("rope_scaling_factor", (8, 8.0), "Megatron-LM computes with 8 all the same")
    if "num_experts" not in given:
        return options
    options |= {name: given[name] for name in _EXPERTS if name in given}
    options["moe_layer_freq"] = str(given.get("moe_layer_freq", 1)).replace(" ", "")
    kinds = given.get("moe_router_load_balancing_type", "none")
    if not {*(kinds if isinstance(kinds, list) else [kinds])} <= {*_BALANCING, "none"}:
        raise fields.wrong("moe_router_load_balancing_type", f"of {', '.join(_BALANCING)}, none")
    if kinds not in _BALANCING:  # of several at once none is carried: flags may give one
        options |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
    if "moe_expert_capacity_factor" in given:
        options["moe_token_drop_policy"] = given.get("moe_token_drop_policy", "probs")
    if has_our_layers:
        return _with_system(fields, given, options)
    whole = given.get("moe_router_pre_softmax", False)
    is_softmax = given.get("moe_router_score_function", "softmax") == "softmax"
    if fields.integer("moe_router_topk") == 1 and is_softmax and not whole:
        raise InputError(
            f"{fields.file}: moe_router_topk is 1 and its probability is renormalized to 1, so its "
            "router would not learn: it cannot be imported"
        )
    return options | {"moe_router_pre_softmax": whole and is_softmax}


def _with_system(fields: Fields, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """With the options of the file, and those of Megatron-LM that the file's system has, too."""
    try:
        file = parse_json(str(given.get(ARGUMENT)).encode())
    except ValueError:
        file = None
    if not isinstance(file, dict):
        raise fields.wrong(ARGUMENT, f"the content of the file of {FILE}, as JSON")
    system = type(make_config(file).selection).system
    by_system = selection_options()
    foreign = set[str]().union(*by_system.values()) - by_system[system].keys()
    theirs = {name: given[name] for name in by_system[system] if name in given} | options
    left_out = foreign | (file.keys() & set(BIAS))  # Megatron-LM has a bias with sigmoid alone
    both = file | {name: value for name, value in theirs.items() if name not in left_out}
    return {name: value for name, value in both.items() if name not in OF_RUN}


def lack_of(config: Config) -> str | None:
    """The first option of a model that Megatron-LM does not have; None: it has all."""
    model, selection = config.model, config.selection
    if model.qk_layernorm_all_heads:
        return "--qk-layernorm-all-heads"
    if model.use_rope_scaling and model.rope_scaling_factor != 8:
        return f"--rope-scaling-factor {model.rope_scaling_factor}"
    if config.moe.num_experts is None:
        return None
    if type(selection) is not TopKSelection:  # a subclass may have another rule
        return f"--expert-selection {selection.system}"
    for name in (
        "moe_router_hidden_size",
        "moe_gate_low_rank_size",
        "moe_router_force_routing",
        "moe_zero_experts",
        "moe_copy_experts",
        "moe_constant_experts",
    ):
        if getattr(selection, name) != getattr(TopKSelection(), name):
            return f"--{name.replace('_', '-')} {getattr(selection, name)}"
    if selection.moe_router_enable_expert_bias and selection.moe_router_score_function != "sigmoid":
        return "--moe-router-enable-expert-bias beside --moe-router-score-function softmax"
    return None


def arguments_of(config: Config, rows: int, dtype: torch.dtype, transformer_impl: str) -> Namespace:
    """Megatron-LM's arguments for a model that it has, which --use-checkpoint-args reads.

    `rows`, `dtype`: of the embedding. What changes no model is left out.
    """
    model = config.model
    values = {name: value for _, section in config.values() for name, value in section.items()}
    arguments = {name: values[name] for name in (*_MODEL, *_EXPERTS)} | {
        "kv_channels": model.head_width,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "max_position_embeddings": config.positions,
        "layernorm_epsilon": model.norm_epsilon,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": math.gcd(rows, model.make_vocab_size_divisible_by),
        "tokenizer_type": config.data.tokenizer_type,
        "bf16": dtype == torch.bfloat16,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "swiglu": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": transformer_impl,
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    if config.moe.num_experts is not None:
        selection = config.selection
        assert isinstance(selection, TopKSelection)
        is_softmax = selection.moe_router_score_function == "softmax"
        arguments |= {
            "moe_ffn_hidden_size": config.expert_width,
            "moe_layer_freq": 1 if all(config.moe_layers) else [*map(int, config.moe_layers)],
            "moe_router_pre_softmax": is_softmax and not selection.renormalizes,
        }
    return Namespace(**arguments)
