"""Which tensors of transformers are which part of a checkpoint's, and how one becomes the other.

A place serves both directions: a `Form` joins tensors of transformers to a part of one of ours, and
splits it again, to the bit. A step serves exports, also those of our own architecture
(`moe_parallel.hf`). None of them needs a model or a world.

Shape suffixes: E experts, D model width, F inner width, R low-rank size (d_low) or routing neurons
of an expert, G key/value heads, Q queries per key/value head, C width of a head, V vocabulary, K
experts per token, Z free experts, X any axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from moe_parallel.balancing.bias import balancing_bias
from moe_parallel.config import Config, ModelConfig, Selection
from moe_parallel.layers.system import system_of


@dataclass(frozen=True)
class Form:
    """Tensors of transformers to a part of one of our tensors, and back, to the bit.

    A form only reorders and pads: `split` is the inverse of `join`, and drops the padding.
    """

    join: Callable[[list[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Iterable[torch.Tensor]]


#: One tensor, unchanged.
SAME = Form(lambda theirs: theirs[0], lambda part: [part])
#: The gate's and the other matrix of a dense SwiGLU layer, both [F, D], one above the other.
HALVES = Form(torch.cat, lambda part: part.chunk(2))
#: The same two matrices of one expert, as [1, D, 2, F].
EXPERT_HALVES = Form(
    lambda theirs: torch.stack([half_FD.T for half_FD in theirs], dim=1)[None],
    lambda part: [half_DF.T for half_DF in part[0].unbind(1)],
)
#: The last matrix of one expert, [D, F], as [1, F, D].
EXPERT_OUT = Form(lambda theirs: theirs[0].T[None].contiguous(), lambda part: [part[0].T])


def padded_rows(rows: int, padded: int) -> Form:
    """A matrix [V, D], padded with zero rows."""
    return Form(
        lambda theirs: F.pad(theirs[0], (0, 0, 0, padded - rows)), lambda part: [part[:rows]]
    )


def interleaved(groups: int, queries: int, width: int) -> Form:
    """Queries, keys and values, [G * Q * C, X] and twice [G * C, X], by key/value head.

    Megatron-Core's order is: the queries of a key/value head, its key, its value; then the next.
    """

    def join(theirs: list[torch.Tensor]) -> torch.Tensor:
        by_group = [tensor.unflatten(0, (groups, -1)) for tensor in theirs]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(part: torch.Tensor) -> list[torch.Tensor]:
        by_group = part.unflatten(0, (groups, -1)).split([queries * width, width, width], dim=1)
        return [tensor.flatten(0, 1) for tensor in by_group]

    return Form(join, split)


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
    return whole(key, shape, [(name, shape)], SAME)


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
    form = padded_rows(vocab_size, padded)
    return whole(key, (padded, width), [(name, (vocab_size, width))], form)


def attention_places(model: ModelConfig, layer: int) -> Iterator[TensorPlace]:
    """The two norms of a layer, and its attention."""
    d, c, g = model.hidden_size, model.head_width, model.query_groups
    q, kv = model.num_attention_heads * c, g * c
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}"
    yield same(f"{ours}.linear_qkv.layer_norm_weight", f"{theirs}.input_layernorm.weight", d)
    form = interleaved(g, model.num_attention_heads // g, c)
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
    yield whole(f"{ours}.linear_fc1.weight", (2 * f, d), halves, HALVES)
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
            EXPERT_HALVES,
        )
        yield TensorPlace(
            f"{ours}.experts.w_out_LFD",
            (n, f, d),
            (e, 0, 0),
            (1, f, d),
            (f"{expert}.{named.down}.weight",),
            ((d, f),),
            EXPERT_OUT,
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


Tensors = Iterable[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Some tensors of a checkpoint, read together, and those of the exported model made of them."""

    keys: tuple[str, ...]  # of the checkpoint's tensors
    shapes: tuple[TensorShape, ...]  # of these tensors
    results: tuple[tuple[str, TensorShape], ...]  # name and shape of each result, in order
    make: Callable[..., Tensors]  # from the tensors to the results, in order
    always_fp32: bool = False  # whatever the dtype of the export


def plain_steps(places: Iterable[TensorPlace]) -> list[Step]:
    """The steps of a plain architecture. Each tensor of the checkpoint is read once."""
    by_key: dict[str, list[TensorPlace]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    return [_of_places(parts) for parts in by_key.values()]


def _of_places(places: Sequence[TensorPlace]) -> Step:
    def make(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for place in places:
            part = tensor
            for axis, (offset, size) in enumerate(zip(place.offset, place.sizes, strict=True)):
                part = part.narrow(axis, offset, size)
            yield from place.form.split(part)

    results = [pair for place in places for pair in zip(place.names, place.shapes, strict=True)]
    return Step((places[0].key,), (places[0].shape,), tuple(results), make)


_TILE = 16  # Eq. 5 of AoE gives any width, and kernels want rows of a multiple of 16 bytes or more


@dataclass(frozen=True)
class LayerSource:
    """A layer of experts in a checkpoint."""

    config: Config
    layer: int  # from 0
    vocab_size: int  # of the tensors that are written, without our padding
    fold: bool  # multiply W_g = W_down W_up out

    @property
    def selection(self) -> Any:
        """The options of the system; each function below knows which there are."""
        return self.config.selection

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, D and the number of scores of a token."""
        n = self.config.num_experts
        return n, self.config.model.hidden_size, n + self.selection.free_experts

    def step(
        self,
        key: str,
        shape: TensorShape,
        name: str,
        form: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        always_fp32: bool = False,
    ) -> Step:
        """From the layer's tensor `key`, of this shape, to the one called `name`."""
        result = tuple(form(torch.empty(shape, device="meta")).shape)
        names = ((f"model.layers.{self.layer}.mlp.{name}", result),)
        return Step((self.key(key),), (shape,), names, lambda x: [form(x)], always_fp32)

    def key(self, key: str) -> str:
        """The complete key of one of the layer's tensors."""
        return f"decoder.layers.{self.layer}.mlp.{key}"


def folded_width(config: Config) -> int:
    """The width of a folded expert: that of the run, rounded up to whole tiles of the kernels.

    The columns that are added are 0 and change no output.
    """
    return -(-config.expert_width // _TILE) * _TILE


def dispatched_width(config: Config) -> int:
    """The width of an expert without its routing neurons."""
    return config.selection.dispatched_width(config.expert_width, config.num_experts)


def routing_neurons(config: Config) -> int:
    """How many neurons of an expert compute every token. 0: the system has none."""
    return config.expert_width - dispatched_width(config)


def low_rank_size(selection: Selection) -> int | None:
    """d_low of experts with a factorized W_g. None: W_g is one matrix."""
    sizes = selection.low_rank_sizes
    return sizes[0][1] if sizes else None


def has_bias(selection: Selection) -> bool:
    """Whether a layer has a balancing bias or cutoffs."""
    makes_cutoffs = system_of(selection).bias is not balancing_bias
    return makes_cutoffs or getattr(selection, "moe_router_enable_expert_bias", False)


def routed_steps(source: LayerSource) -> list[Step]:
    """A layer with a router. A factorized W_g that is folded has no W_down."""
    rank, h = low_rank_size(source.selection), source.selection.moe_router_hidden_size
    _, d, scores = source.sizes
    if h is None:
        gate = [source.step("w_router_ED", (scores, d), "gate.router_out")]
    else:
        gate = [source.step("w_router_HD", (h, d), "gate.router_in"),
                source.step("w_router_EH", (scores, h), "gate.router_out")]  # fmt: skip
    if rank is not None and not source.fold:
        gate.append(_w_down(source, rank))
    return _dispatched(source, [*gate, *_bias(source)])


def autonomous_steps(source: LayerSource) -> list[Step]:
    """A layer of AoE. Its scores of free experts are stored in units of a norm."""
    (_, d, _), selection = source.sizes, source.selection
    rank, z = selection.aoe_low_rank_size, selection.free_experts
    gate = [_w_down(source, rank), *_bias(source)]
    if z:
        unit = source.config.model.init_method_std * math.sqrt(d * rank)
        gate.append(
            source.step("w_free_Z", (z,), "gate.free_scores", lambda w_Z: unit * w_Z.float(), True)
        )
    return _dispatched(source, gate)


def routing_free_steps(source: LayerSource) -> list[Step]:
    """A layer of Routing-Free MoE. Its biases are subtracted from norms; an exported one adds."""
    bias = source.step("b_E", source.sizes[:1], "gate.expert_bias", torch.neg, always_fp32=True)
    return _dispatched(source, [_w_down(source, source.selection.aoe_low_rank_size), bias])


def union_steps(source: LayerSource) -> list[Step]:
    """A layer of UoE. The routing neurons of all experts are a SwiGLU layer of width E R."""
    (n, d, _), r = source.sizes, routing_neurons(source.config)
    neurons = [
        source.step(
            "w_gate_up_ED2R",
            (n, d, 2, r),
            "gate.neurons_in",
            lambda w_ED2R: w_ED2R.permute(2, 0, 3, 1).flatten(0, 2),
        ),
        source.step(
            "w_out_ERD", (n, r, d), "gate.neurons_out", lambda w_ERD: w_ERD.flatten(0, 1).T
        ),
    ]
    return _dispatched(source, [*neurons, *_bias(source)])


def merged_steps(source: LayerSource) -> list[Step]:
    """A layer that merges its experts."""
    router = source.step("w_router_ED", source.sizes[:2], "router_out")
    return [router, *_swiglu(source, within="")]


def _dispatched(source: LayerSource, gate: list[Step]) -> list[Step]:
    """A layer that dispatches tokens; `gate` makes the scores."""
    (_, d, _), selection, steps = source.sizes, source.selection, list(gate)
    if selection.reads_token_ids:  # the experts of each id, without ids that pad the vocabulary
        table = source.config.padded_vocab_size(source.vocab_size), selection.choices_per_token
        steps.append(
            source.step(
                "hash_table.experts_VK",
                table,
                "gate.expert_table",
                lambda experts_VK: experts_VK[: source.vocab_size],
            )
        )
    if c := selection.free_kinds.constant:
        steps.append(source.step("w_constant_CAD", (c, 2, d), "free_experts.w_constant"))
        steps.append(source.step("v_CD", (c, d), "free_experts.v_constant"))
    rank = low_rank_size(selection)
    if rank is None:
        steps += _swiglu(source)
    else:
        steps += _folded(source, rank) if source.fold else _low_rank(source, rank)
    return steps + plain_steps(shared(source.config, source.layer, ExpertNames()))


def _w_down(source: LayerSource, rank: int) -> Step:
    n, d, _ = source.sizes
    return source.step(
        "w_down_EDR", (n, d, rank), "gate.w_down", lambda w: w.transpose(1, 2).flatten(0, 1)
    )


def _bias(source: LayerSource) -> list[Step]:
    if not has_bias(source.selection):
        return []
    return [source.step("bias.bias_E", source.sizes[2:], "gate.expert_bias", always_fp32=True)]


def _swiglu(source: LayerSource, within: str = "experts.") -> list[Step]:
    (n, d, _), f = source.sizes, dispatched_width(source.config)
    return [
        source.step(
            "experts.w_gate_up_LD2F",
            (n, d, 2, f),
            f"{within}gate_up_proj",
            lambda w_ED2F: w_ED2F.permute(0, 2, 3, 1).flatten(1, 2),
        ),
        source.step("experts.w_out_LFD", (n, f, d), f"{within}down_proj", _transposed),
    ]


def _low_rank(source: LayerSource, rank: int) -> list[Step]:
    (n, d, _), f = source.sizes, source.config.expert_width
    return [
        source.step(
            "experts.w_up_LRW",
            (n, rank, f),
            "experts.gate_proj",
            lambda w_ERF: w_ERF.transpose(1, 2).flatten(0, 1),
        ),
        source.step("experts.w_p_LDW", (n, d, f), "experts.up_proj", _transposed),
        source.step("experts.w_out_LWD", (n, f, d), "experts.down_proj", _transposed),
    ]


def _transposed(w_EXX: torch.Tensor) -> torch.Tensor:
    return w_EXX.transpose(1, 2)


def _folded(source: LayerSource, rank: int) -> list[Step]:
    (n, d, _), f, padded = source.sizes, source.config.expert_width, folded_width(source.config)
    gate_up = f"model.layers.{source.layer}.mlp.experts.gate_up_proj", (n, 2 * padded, d)
    keys = ("w_down_EDR", "experts.w_up_LRW", "experts.w_p_LDW")
    return [
        Step(
            tuple(map(source.key, keys)),
            ((n, d, rank), (n, rank, f), (n, d, f)),
            (gate_up,),
            partial(_fold, padded),
        ),
        source.step(
            "experts.w_out_LWD",
            (n, f, d),
            "experts.down_proj",
            lambda w_EFD: F.pad(w_EFD.transpose(1, 2), (0, padded - f)),
        ),
    ]


def _fold(
    padded: int, w_down_EDR: torch.Tensor, w_up_ERF: torch.Tensor, w_p_EDF: torch.Tensor
) -> Tensors:
    """W_g = W_down W_up above W_p, with zeros up to the width `padded`. W_g is rounded once."""
    e, d, f = w_p_EDF.shape
    gate_up_E2FD = w_p_EDF.new_zeros(e, 2, padded, d)
    for expert in range(e):
        gate_DF = w_down_EDR[expert].double() @ w_up_ERF[expert].double()
        gate_up_E2FD[expert, 0, :f] = gate_DF.T
        gate_up_E2FD[expert, 1, :f] = w_p_EDF[expert].T
    return [gate_up_E2FD.flatten(1, 2)]
