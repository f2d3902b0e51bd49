"""Which tensors of transformers are which part of our checkpoints.

Each function yields the places of one part of a model. None of them needs a model or a world.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_parallel.config import Config, ModelConfig
from moe_parallel.huggingface.forms import (
    ExpertHalves,
    ExpertOut,
    Form,
    Halves,
    Interleaved,
    PaddedRows,
    Same,
)

TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPlace:
    """A part of one of our tensors, and the tensors of transformers that it consists of."""

    key: str  # of our tensor in a checkpoint
    shape: TensorShape  # of the whole tensor
    offset: TensorShape  # of the part's first element in the whole tensor
    sizes: TensorShape  # of the part
    names: tuple[str, ...]  # of their tensors
    shapes: tuple[TensorShape, ...]  # of their tensors, in the order of `names`
    form: Form


@dataclass(frozen=True)
class ExpertNames:
    """The names of the layers of experts in transformers."""

    block: str = "mlp"
    gate: str = "gate_proj"  # W_g
    up: str = "up_proj"  # W_p
    down: str = "down_proj"  # W_o


def whole(
    key: str, shape: TensorShape, names: Sequence[tuple[str, TensorShape]], form: Form
) -> TensorPlace:
    """The place of a complete tensor."""
    their_names, shapes = zip(*names, strict=True)
    return TensorPlace(key, shape, (0,) * len(shape), shape, their_names, shapes, form)


def same(key: str, name: str, *shape: int) -> TensorPlace:
    """The place of a tensor that is the same in both."""
    return whole(key, shape, [(name, shape)], Same())


def embedding_places(config: Config, vocab_size: int) -> Iterator[TensorPlace]:
    """The embedding."""
    key = "embedding.word_embeddings.weight"
    yield _table(key, "model.embed_tokens.weight", config, vocab_size)


def head_places(config: Config, vocab_size: int) -> Iterator[TensorPlace]:
    """The last norm, and the output layer if it has a matrix of its own."""
    yield same("decoder.final_layernorm.weight", "model.norm.weight", config.model.hidden_size)
    if config.model.untie_embeddings_and_output_weights:
        yield _table("output_layer.weight", "lm_head.weight", config, vocab_size)


def _table(key: str, name: str, config: Config, vocab_size: int) -> TensorPlace:
    width, padded = config.model.hidden_size, config.padded_vocab_size(vocab_size)
    form = PaddedRows(vocab_size, padded)
    return whole(key, (padded, width), [(name, (vocab_size, width))], form)


def attention_places(model: ModelConfig, layer: int) -> Iterator[TensorPlace]:
    """The two norms of a layer, and its attention."""
    d, c, g = model.hidden_size, model.head_width, model.query_groups
    q, kv = model.num_attention_heads * c, g * c
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}"
    yield same(f"{ours}.linear_qkv.layer_norm_weight", f"{theirs}.input_layernorm.weight", d)
    form = Interleaved(g, model.num_attention_heads // g, c)
    widths = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    names = [(f"{theirs}.self_attn.{name}.weight", (width, d)) for name, width in widths]
    yield whole(f"{ours}.linear_qkv.weight", (q + 2 * kv, d), names, form)
    if model.add_qkv_bias:
        biases = [(f"{theirs}.self_attn.{name}.bias", (width,)) for name, width in widths]
        yield whole(f"{ours}.linear_qkv.bias", (q + 2 * kv,), biases, form)
    if model.qk_layernorm:
        for name, width in (("q", q), ("k", kv)):
            normed = width if model.qk_layernorm_all_heads else c
            yield same(
                f"{ours}.{name}_layernorm.weight", f"{theirs}.self_attn.{name}_norm.weight", normed
            )
    yield same(f"{ours}.linear_proj.weight", f"{theirs}.self_attn.o_proj.weight", d, q)
    yield same(
        f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
        f"{theirs}.post_attention_layernorm.weight",
        d,
    )


def swiglu_places(ours: str, theirs: str, d: int, f: int) -> Iterator[TensorPlace]:
    """A dense SwiGLU layer of width f; the first two arguments begin the names."""
    halves = [(f"{theirs}.{name}.weight", (f, d)) for name in ("gate_proj", "up_proj")]
    yield whole(f"{ours}.linear_fc1.weight", (2 * f, d), halves, Halves())
    yield same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", d, f)


def dense_places(config: Config, layer: int) -> Iterator[TensorPlace]:
    """The feed-forward layer of a layer without experts."""
    d, f = config.model.hidden_size, config.model.ffn_hidden_size
    yield from swiglu_places(f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", d, f)


def routed(config: Config, layer: int, named: ExpertNames) -> Iterator[TensorPlace]:
    """The router and the experts of a layer."""
    d, f, n = config.model.hidden_size, config.expert_width, config.num_experts
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.{named.block}"
    yield same(f"{ours}.w_router_ED", f"{theirs}.gate.weight", n, d)
    for e in range(n):
        expert = f"{theirs}.experts.{e}"
        yield TensorPlace(
            f"{ours}.experts.w_gate_up_LD2F",
            (n, d, 2, f),
            (e, 0, 0, 0),
            (1, d, 2, f),
            (f"{expert}.{named.gate}.weight", f"{expert}.{named.up}.weight"),
            ((f, d), (f, d)),
            ExpertHalves(),
        )
        yield TensorPlace(
            f"{ours}.experts.w_out_LFD",
            (n, f, d),
            (e, 0, 0),
            (1, f, d),
            (f"{expert}.{named.down}.weight",),
            ((d, f),),
            ExpertOut(),
        )


def shared(config: Config, layer: int, named: ExpertNames) -> Iterator[TensorPlace]:
    """The shared expert of a layer and its gate, if there are any."""
    of_run, d = config.selection.shared_expert, config.model.hidden_size
    if of_run is None:
        return
    ours, theirs = f"decoder.layers.{layer}.mlp.shared", f"model.layers.{layer}.{named.block}"
    yield from swiglu_places(f"{ours}.dense", f"{theirs}.shared_expert", d, of_run.width)
    if of_run.gate:
        yield same(f"{ours}.w_gate_1D", f"{theirs}.shared_expert_gate.weight", 1, d)


def plain(config: Config, vocab_size: int, named: ExpertNames) -> Iterator[TensorPlace]:
    """Every tensor of a dense model, or of a top-k model with a linear router, layer by layer."""
    yield from embedding_places(config, vocab_size)
    for layer, is_moe in enumerate(config.moe_layers):
        yield from attention_places(config.model, layer)
        if is_moe:
            yield from routed(config, layer, named)
            yield from shared(config, layer, named)
        else:
            yield from dense_places(config, layer)
    yield from head_places(config, vocab_size)
