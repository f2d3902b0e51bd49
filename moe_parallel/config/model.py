"""The options of the dense parts of the model, and the pattern of its MoE layers."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import divides, shown
from moe_parallel.config.option import Section, option
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class ModelConfig(Section):
    """A GPT with RMSNorm, RoPE and SwiGLU; the only biases are those of --add-qkv-bias."""

    num_layers: int = option(4, "number of transformer layers (L)", least=1, most=10_000)
    hidden_size: int = option(256, "model width (d)", least=1)
    num_attention_heads: int = option(4, "number of attention heads", least=1)
    num_query_groups: int | None = option(
        None,
        "number of key/value heads for grouped-query attention; none: one per attention head",
        least=1,
    )
    kv_channels: int | None = option(
        None, "width of an attention head; none: hidden size / number of heads", least=1
    )
    qk_layernorm: bool = option(
        False, "RMSNorm of the queries and keys of each attention head, before RoPE (Qwen3)"
    )
    qk_layernorm_all_heads: bool = option(
        False,
        "with --qk-layernorm: one RMSNorm over all heads of the queries, and one over those of "
        "the keys, instead of one per head (OLMoE)",
    )
    add_qkv_bias: bool = option(
        False, "add a bias to queries, keys and values, the model's only biases (Qwen2)"
    )
    ffn_hidden_size: int = option(
        1024, "width of a dense SwiGLU feed-forward layer (d_ffn)", least=1
    )
    norm_epsilon: float = option(1e-5, "added to the mean square in RMSNorm", above=0)
    rotary_base: int = option(10000, "base of the rotary position angles", least=1)
    use_rope_scaling: bool = option(
        False,
        "divide the low frequencies of the rotary position angles as Llama 3.1 does, for texts "
        "longer than 8192 tokens",
    )
    rope_scaling_factor: float = option(
        8.0, "number by which --use-rope-scaling divides; Llama 3.2: 32", above=0
    )
    max_position_embeddings: int | None = option(
        None,
        "the most tokens that the model reads, as an import found it and an export writes it; "
        "none, or less than --seq-length: that",
        least=1,
    )
    init_method_std: float = option(
        0.02, "standard deviation of every initial weight matrix; norm weights start at 1", above=0
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "give the output layer its own matrix instead of the embedding's"
    )
    make_vocab_size_divisible_by: int = option(
        128, "round the vocabulary size up to a multiple of this, in every parallel layout", least=1
    )

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        tp = config.parallel.tensor_model_parallel_size
        self._check_heads()
        divides(
            self.num_attention_heads, "num_attention_heads", self.query_groups, "num_query_groups"
        )
        for name, size in (
            ("num_attention_heads", self.num_attention_heads),
            ("num_query_groups", self.query_groups),
            ("ffn_hidden_size", self.ffn_hidden_size),
            ("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by),
        ):
            divides(size, name, tp, "tensor_model_parallel_size")

    def _check_heads(self) -> None:
        if self.kv_channels is None:
            divides(
                self.hidden_size, "hidden_size", self.num_attention_heads, "num_attention_heads"
            )
        elif self.kv_channels % 2:
            raise InputError(
                f"--kv-channels is {self.kv_channels}, and rotary positions turn pairs of "
                "channels: choose an even number"
            )
        if self.head_width % 2:
            raise InputError(
                f"--hidden-size {self.hidden_size} over --num-attention-heads "
                f"{self.num_attention_heads} gives heads of odd size, which rotary positions "
                "cannot turn: change one of them"
            )
        if self.qk_layernorm_all_heads and not self.qk_layernorm:
            raise InputError(
                "--qk-layernorm-all-heads says what --qk-layernorm normalizes: set that too"
            )


def moe_layer_pattern(moe_layer_freq: str, num_layers: int) -> tuple[bool, ...]:
    """For each layer, first to last, whether it is an MoE layer.

    Args:
        moe_layer_freq: N, or a list of 0 and 1 built with `+` and `*`, as in Megatron.
        num_layers: the number of layers of the model; a pattern must have as many entries.

    Raises InputError if the pattern cannot be read or has another length.
    """
    problem = InputError(
        f"--moe-layer-freq is {shown(moe_layer_freq)}: it takes N >= 1, or a pattern of "
        f"{num_layers} zeros and ones such as [0]+[1]*{num_layers - 1}"
    )
    # A pattern needs three characters per layer. Python's parser may fail on much longer text.
    if len(moe_layer_freq) > 4 * num_layers + 100 or set(moe_layer_freq) - set(
        "-0123456789[](),+* "
    ):
        raise problem
    try:
        value = _evaluate(ast.parse(moe_layer_freq.strip(), mode="eval").body, num_layers)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise problem from None
    if isinstance(value, int):
        if value < 1:
            raise problem
        return tuple(layer % value == 0 for layer in range(num_layers))
    if len(value) != num_layers or not set(value) <= {0, 1}:
        raise problem
    return tuple(entry == 1 for entry in value)


def _evaluate(node: ast.expr, longest: int) -> int | list[int]:
    """The value of a pattern: an integer or a list of integers, with `+` and `*`.

    Raises ValueError for any other syntax, and for a list longer than `longest`, before the list is
    built. Raises TypeError for a sum or product of the wrong types.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        entries = [_evaluate(entry, longest) for entry in node.elts]
        return [_integer(entry) for entry in entries]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _evaluate(node.left, longest), _evaluate(node.right, longest)
        return left + right  # type: ignore[operator]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _evaluate(node.left, longest), _evaluate(node.right, longest)
        if isinstance(left, list):
            left, right = right, left
        if isinstance(right, list) and len(right) * _integer(left) > longest:
            raise ValueError(f"longer than {longest}")
        return left * right  # type: ignore[operator]
    raise ValueError(type(node).__name__)


def _integer(value: int | list[int]) -> int:
    if isinstance(value, int):
        return value
    raise TypeError("a list, where an integer is needed")
