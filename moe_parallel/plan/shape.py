"""The sizes of a model and of its sequences, from which everything else is computed."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config import AutonomousSelection, Config, RoutedSelection, TopKSelection
from moe_parallel.config.selection import AoESelection
from moe_parallel.errors import InputError


@dataclass(frozen=True)
class LayerWeight:
    """A weight of a layer of experts, and the ranks that divide it."""

    name: str
    size: int  # in numbers, over all ranks
    divided_by: str  # "none", "tp", or "experts": by ep and etp


@dataclass(frozen=True)
class Scoring:
    """AoE's scores: the norms of C = x W_down of all n experts."""

    rank: int  # d_low
    gathers_w_down: bool = False
    sends_c: bool = False
    recomputes_scores: bool = True
    recomputes_gate: bool = True
    all_norms_learn: bool = True  # --aoe-gradient full
    joins_norms: bool = False  # experts on the token's rank differentiate the norms


@dataclass(frozen=True)
class Experts:
    """The experts of a layer."""

    number: int  # n
    per_token: int  # K
    width: int  # f of a SwiGLU expert, d_wide of AoE
    weights: tuple[LayerWeight, ...]  # in the order in which the layer registers them
    scoring: Scoring | None = None  # None: a linear router
    has_loss: bool = True  # a load-balancing loss over the micro-batch


@dataclass(frozen=True)
class Shape:
    """A GPT with RMSNorm, RoPE, SwiGLU and no biases, and its sequences."""

    moe_layers: tuple[bool, ...]  # for each layer, whether it has experts
    hidden: int  # d
    heads: int
    groups: int  # key/value heads
    head_width: int
    dense_width: int  # of a dense SwiGLU layer
    vocabulary: int  # padded
    tied: bool  # embedding and output layer are one matrix
    seq_length: int
    bf16: bool  # otherwise fp32
    experts: Experts | None = None
    loss_chunk: int = 512  # tokens whose logits exist at a time
    fp8_linear: bool = False  # attention's and dense products in FP8
    fp8_experts: bool = False  # experts' products in FP8

    @property
    def value(self) -> int:
        """Bytes of a weight and of an activation."""
        return 2 if self.bf16 else 4

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.groups) * self.head_width


def shape_of(config: Config, vocab_size: int) -> Shape:
    """The shape of any configuration. `plannable` says whether a whole plan is possible."""
    model, training = config.model, config.training
    return Shape(
        moe_layers=config.moe_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        groups=model.query_groups,
        head_width=model.hidden_size // model.num_attention_heads,
        dense_width=model.ffn_hidden_size,
        vocabulary=config.padded_vocab_size(vocab_size),
        tied=not model.untie_embeddings_and_output_weights,
        seq_length=training.seq_length,
        bf16=training.bf16,
        experts=None if config.moe.num_experts is None else _experts(config),
        loss_chunk=training.loss_chunk_size,
        fp8_experts=config.fp8.fp8_format is not None,
    )


def _experts(config: Config) -> Experts:
    selection, n, d = config.selection, config.num_experts, config.model.hidden_size
    scoring = None
    if isinstance(selection, AutonomousSelection):
        scoring = Scoring(
            selection.aoe_low_rank_size,
            selection.aoe_gather_w_down,
            selection.aoe_send_activations,
            selection.aoe_recompute_scores,
            selection.aoe_recompute_gate,
            selection.aoe_gradient == "full",
            selection.aoe_gradient == "selected" and config.fp8.fp8_format is None,
        )
    return Experts(
        number=n,
        per_token=selection.choices_per_token or 1,
        width=config.expert_width,
        weights=_weights(config, d, n),
        scoring=scoring,
        has_loss=bool(getattr(selection, "moe_aux_loss_coeff", 0)),
    )


def _weights(config: Config, d: int, n: int) -> tuple[LayerWeight, ...]:
    selection, f = config.selection, config.expert_width
    sums = selection.layer_weights(d, n, f)
    if not sums.tensor_parallel:
        if isinstance(selection, AutonomousSelection):
            held_by = "experts" if selection.aoe_gather_w_down else "none"
            return aoe_weights(d, n, selection.aoe_low_rank_size, f, held_by)
        if isinstance(selection, RoutedSelection) and selection.moe_gate_low_rank_size is None:
            return swiglu_weights(d, n, f, router=sums.replicated)
    named = ("replicated", "none"), ("tensor parallel", "tp"), ("expert parallel", "experts")
    return tuple(LayerWeight(name, size, by) for (name, by), size in zip(named, sums, strict=True))


def swiglu_weights(d: int, n: int, f: int, router: int | None = None) -> tuple[LayerWeight, ...]:
    """Of a routed layer. `router`: the size of the router; None: d n."""
    return (
        LayerWeight("w_router", n * d if router is None else router, "none"),
        LayerWeight("w_gate_up", n * d * 2 * f, "experts"),
        LayerWeight("w_out", n * f * d, "experts"),
    )


def aoe_weights(d: int, n: int, r: int, w: int, held_by: str) -> tuple[LayerWeight, ...]:
    """Of an autonomous layer with d_low = r and d_wide = w."""
    return (
        LayerWeight("w_down", n * d * r, held_by),
        LayerWeight("w_up", n * r * w, "experts"),
        LayerWeight("w_p", n * d * w, "experts"),
        LayerWeight("w_out", n * w * d, "experts"),
    )


def plannable(config: Config) -> None:
    """Raise InputError for an option whose memory or messages the formulas do not describe."""
    if config.training.loss_chunk_size == 0:
        raise InputError(
            "--loss-chunk-size is 0, and a plan has no formula for Megatron-Core's own loss: "
            "choose a positive number"
        )
    if config.training.attention_backend in ("local", "unfused"):
        raise InputError(
            f"--attention-backend is {config.training.attention_backend}, and a plan has no "
            "formula for S x S scores: choose auto, flash or fused"
        )
    if config.moe.num_experts is None:
        return
    selection = config.selection
    if not isinstance(selection, TopKSelection | AoESelection):
        raise InputError(
            f"--expert-selection is {selection.system}, and a plan has formulas for topk and aoe "
            "only: plan one of them with the same sizes"
        )
    without: dict[str, object] = {
        "--moe-shared-expert-intermediate-size": getattr(
            selection, "moe_shared_expert_intermediate_size", None
        ),
        "--moe-router-hidden-size": getattr(selection, "moe_router_hidden_size", None),
        "--moe-gate-low-rank-size": getattr(selection, "moe_gate_low_rank_size", None),
        "--moe-input-jitter-eps": getattr(selection, "moe_input_jitter_eps", None),
        "--moe-z-loss-coeff": getattr(selection, "moe_z_loss_coeff", None),
        "--moe-importance-loss-coeff": getattr(selection, "moe_importance_loss_coeff", None),
        "--aoe-fp8-screening": getattr(selection, "aoe_fp8_screening", None),
        "--moe-expert-capacity-factor": config.moe.moe_expert_capacity_factor,
    }
    for name, value in without.items():
        if value:
            raise InputError(
                f"{name} is {value}, and a plan has no formula for it: leave it out of the plan"
            )
