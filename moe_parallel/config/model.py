"""The shape of the model."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from moe_parallel.config.option import option, shown
from moe_parallel.errors import InputError


@dataclass(frozen=True)
class ModelConfig:
    """A GPT with RMSNorm, RoPE, SwiGLU and no biases; feed-forward layers dense or of experts."""

    num_layers: int = option(4, "transformer layers (L)")
    hidden_size: int = option(256, "model width (d)")
    num_attention_heads: int = option(4, "attention heads")
    num_query_groups: int | None = option(
        None, "key/value heads of grouped-query attention; none: as many as attention heads"
    )
    ffn_hidden_size: int = option(1024, "width of a dense SwiGLU feed-forward layer (d_ffn)")
    norm_epsilon: float = option(1e-5, "added to the mean square in RMSNorm")
    rotary_base: int = option(10000, "base of the rotary position angles")
    init_method_std: float = option(
        0.02, "standard deviation of every initial matrix; norm weights start at 1"
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "give the output layer a matrix of its own instead of the embedding's"
    )
    make_vocab_size_divisible_by: int = option(
        128, "round the vocabulary up to a multiple of this, whatever the parallel layout"
    )

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads


@dataclass(frozen=True)
class MoEConfig:
    """What every expert-selection system shares: how many experts, how wide, where, how full."""

    num_experts: int | None = option(None, "experts per MoE layer (n); none: a dense model")
    moe_ffn_hidden_size: int | None = option(
        None, "expert width (d_ffn of one expert); none: --ffn-hidden-size"
    )
    moe_layer_freq: str = option(
        "1",
        "N: every N-th layer is MoE (layers 1, N+1, ...); or a pattern such as [0]+[1]*23 "
        "(in YAML in quotes)",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "an expert takes at most ceil(tokens * K / n * factor) of the tokens that one rank "
        "routes in a micro-batch; none: dropless",
    )
    moe_capacity_counts_topk: bool = option(
        True,
        "count K in that capacity; false: ceil(tokens / n * factor). Where K varies it is not "
        "counted",
    )
    moe_token_drop_policy: str = option(
        "probs",
        "which choices an over-full expert drops: those of least gate, or the latest by position "
        "with all first choices ahead of second choices",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False, "pad every expert's input with zero rows to its capacity, so that sizes are static"
    )
    moe_dense_warmup_percent: float = option(
        0.0,
        "train dense for this share of --train-iters, then copy the feed-forward layers and their "
        "optimizer state into every expert; 0: off",
    )
    moe_use_upcycling: bool = option(
        False, "--load names a dense checkpoint: copy its feed-forward layers into every expert"
    )
    moe_backend: str = option(
        "auto",
        "kernels: plain torch (reference), C++/CUDA (native), native where it is built (auto)",
        choices=("reference", "native", "auto"),
    )


def moe_layer_pattern(moe_layer_freq: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers are MoE layers, first to last.

    Args:
        moe_layer_freq: N, or a list of 0 and 1 built with `+` and `*`, as Megatron takes it.
        num_layers: layers of the model; a pattern must have as many entries.

    Raises InputError if the pattern cannot be read or has another length.
    """
    problem = InputError(
        f"--moe-layer-freq is {shown(moe_layer_freq)}: it takes N >= 1, or a pattern of "
        f"{num_layers} zeros and ones such as [0]+[1]*{num_layers - 1}"
    )
    # Written out, a pattern takes three characters a layer. Python's parser is not for longer ones.
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
    """An integer or a list of integers, with `+` and `*`: what a pattern may say, no more.

    Raises ValueError for anything else and, before it is made, for a list above `longest`;
    TypeError for a sum or product of the wrong two.
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
