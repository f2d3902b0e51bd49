"""The pattern of MoE layers and dense layers in a model."""

from __future__ import annotations

import ast

from moe_parallel.config.message import shown
from moe_parallel.errors import InputError


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
