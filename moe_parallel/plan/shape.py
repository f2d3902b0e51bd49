"""The sizes of a model and of its sequences, from which everything else is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moe_parallel.config import AutonomousSelection, Config
from moe_parallel.config.selection import DynamicChoices, ExpertsChoose, MergedSelection
from moe_parallel.config.selection.selection import LayerWeights
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
class SharedExpert:
    """A dense SwiGLU layer that computes every token beside its experts."""

    width: int
    gate: bool = False  # its output is multiplied by sigmoid(x w)


@dataclass(frozen=True)
class Selection:
    """What a rule of selection keeps, and the losses on it."""

    columns: int | None = None  # slots of a token; None: K
    experts_take: float | None = None  # the tokens that experts choose, as a multiple of all / n
    dynamic: bool = False  # top-p
    sigmoid: bool = False  # scores of a router, divided by the sum over the chosen
    loss_by_sequence: bool = False
    z_loss: bool = False
    entropy_loss: bool = False


@dataclass(frozen=True)
class Experts:
    """The experts of a layer."""

    number: int  # n
    per_token: float  # K, or the mean number of experts of a token
    width: int  # f of a SwiGLU expert, d_wide of AoE
    weights: tuple[LayerWeight, ...]  # in the order in which the layer registers them
    scoring: Scoring | None = None  # None: a linear router
    has_loss: bool = True  # a load-balancing loss over the micro-batch
    selection: Selection = Selection()
    rank: int | None = None  # of W_g = W_down W_up in experts with a router; None: it is whole
    router_hidden: int | None = None  # inner width of a router of two layers; None: one layer
    shared: SharedExpert | None = None

    @property
    def columns(self) -> int:
        """The slots of a token in the tables of choices."""
        return round(self.per_token) if self.selection.columns is None else self.selection.columns

    @property
    def low_rank(self) -> int | None:
        """The low-rank size of the experts; None: SwiGLU experts."""
        return self.rank if self.scoring is None else self.scoring.rank

    def router_sizes(self, hidden: int) -> list[int]:
        """The numbers of weights of a router's layers."""
        h = self.router_hidden
        return [self.number * hidden] if h is None else [h * hidden, h * self.number]

    def rows(self, tokens: int) -> int:
        """The choices of tokens, one after rounding where experts choose."""
        take = self.selection.experts_take
        if take is None:
            return round(tokens * self.per_token)
        each = math.floor(take * tokens / self.number + 0.5)
        return self.number * min(tokens, max(1, each))


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


def shape_of(config: Config, vocab_size: int, mean_choices: float | None = None) -> Shape:
    """The shape of any configuration. `plannable` says whether a whole plan is possible.

    `mean_choices`: the mean number of experts of a token, if the configuration does not say it.
    """
    model, training = config.model, config.training
    return Shape(
        moe_layers=config.moe_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        groups=model.query_groups,
        head_width=model.head_width,
        dense_width=model.ffn_hidden_size,
        vocabulary=config.padded_vocab_size(vocab_size),
        tied=not model.untie_embeddings_and_output_weights,
        seq_length=training.seq_length,
        bf16=training.bf16,
        experts=None if config.moe.num_experts is None else _experts(config, mean_choices),
        loss_chunk=training.loss_chunk_size,
        fp8_experts=config.fp8.fp8_format is not None,
    )


def _experts(config: Config, mean_choices: float | None) -> Experts:
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
    width, f = getattr(selection, "moe_shared_expert_intermediate_size", None), config.expert_width
    without_weights = Experts(
        number=n,
        per_token=selection.mean_choices or mean_choices or 1,
        width=f,
        weights=(),
        scoring=scoring,
        has_loss=bool(getattr(selection, "moe_aux_loss_coeff", 0)),
        selection=_selection(config),
        rank=getattr(selection, "moe_gate_low_rank_size", None),
        router_hidden=getattr(selection, "moe_router_hidden_size", None),
        shared=None
        if width is None
        else SharedExpert(width, getattr(selection, "moe_shared_expert_gate", False)),
    )
    if isinstance(selection, MergedSelection):
        return replace(without_weights, weights=_merged_weights(selection.layer_weights(d, n, f)))
    return replace(without_weights, weights=_weights(without_weights, d))


def _merged_weights(sizes: LayerWeights) -> tuple[LayerWeight, ...]:
    """Of a layer of merged experts, in sums."""
    names = (("w_router", "none"), ("merged, tp", "tp"), ("merged", "experts"))
    return tuple(LayerWeight(name, size, by) for (name, by), size in zip(names, sizes, strict=True))


def _selection(config: Config) -> Selection:
    selection, n = config.selection, config.num_experts
    dynamic = isinstance(selection, DynamicChoices)
    takes = isinstance(selection, ExpertsChoose)
    return Selection(
        columns=n if dynamic or takes else None,
        experts_take=getattr(selection, "moe_expert_choice_capacity_factor", None),
        dynamic=dynamic,
        sigmoid=getattr(selection, "moe_router_score_function", "") == "sigmoid",
        loss_by_sequence=getattr(selection, "moe_router_load_balancing_type", "") == "seq_aux_loss",
        z_loss=bool(getattr(selection, "moe_z_loss_coeff", 0)),
        entropy_loss=bool(getattr(selection, "moe_entropy_loss_coeff", 0)),
    )


def _weights(experts: Experts, d: int) -> tuple[LayerWeight, ...]:
    """Of a layer of experts: its own, those of the shared expert, those of the experts."""
    n, f, shared = experts.number, experts.width, experts.shared
    scoring, rank = experts.scoring, experts.low_rank
    if scoring is not None:
        held_by = "experts" if scoring.gathers_w_down else "none"
        own = [LayerWeight("w_down", n * d * scoring.rank, held_by)]
    else:
        own = [LayerWeight("w_router", size, "none") for size in experts.router_sizes(d)]
    if experts.rank is not None:
        own.append(LayerWeight("w_down", n * d * experts.rank, "none"))
    if shared is not None:
        if shared.gate:
            own.append(LayerWeight("w_shared_gate", d, "none"))
        own.append(LayerWeight("shared_fc1", 2 * shared.width * d, "tp"))
        own.append(LayerWeight("shared_fc2", shared.width * d, "tp"))
    of_experts = swiglu_weights(d, n, f)[1:] if rank is None else aoe_weights(d, n, rank, f, "")[1:]
    return (*own, *of_experts)


def swiglu_weights(d: int, n: int, f: int) -> tuple[LayerWeight, ...]:
    """Of a routed layer."""
    return (
        LayerWeight("w_router", n * d, "none"),
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


def plannable(config: Config, mean_choices: float | None = None) -> None:
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
    for flag in ("qk_layernorm", "add_qkv_bias"):
        if getattr(config.model, flag):
            raise InputError(
                f"--{flag.replace('_', '-')} is true, and a plan has no formula for it: leave it "
                "out of the plan"
            )
    if config.moe.num_experts is None:
        return
    selection = config.selection
    if isinstance(selection, MergedSelection) or selection.system == "segment_expert_choice":
        raise InputError(
            f"--expert-selection is {selection.system}, and a plan has formulas only for systems "
            "that dispatch single tokens: plan topk, aoe or a dense model of the same sizes"
        )
    if selection.mean_choices is None and mean_choices is None:
        raise InputError(
            f"--expert-selection is {selection.system}, which gives tokens different numbers of "
            "experts: set --mean-choices to experts_per_token of a run's metrics.jsonl"
        )
    without: dict[str, object] = {
        "--moe-input-jitter-eps": getattr(selection, "moe_input_jitter_eps", None),
        "--moe-importance-loss-coeff": getattr(selection, "moe_importance_loss_coeff", None),
        "--aoe-fp8-screening": getattr(selection, "aoe_fp8_screening", None),
        "--moe-expert-capacity-factor": config.moe.moe_expert_capacity_factor,
        "--moe-activation-budget": config.moe.moe_activation_budget,
        "--moe-router-force-routing": getattr(selection, "moe_router_force_routing", None),
    }
    if without["--moe-router-force-routing"] == "balanced":
        del without["--moe-router-force-routing"]  # what a plan assumes
    for name, value in without.items():
        if value:
            raise InputError(
                f"{name} is {value}, and a plan has no formula for it: leave it out of the plan"
            )


def no_formula(config: Config) -> str | None:
    """Why a plan does not describe the configuration's layout, where it describes others."""
    tp = config.parallel.tensor_model_parallel_size
    dense = config.moe.num_experts is None
    if tp > 1 and not dense and isinstance(config.selection, ExpertsChoose):
        return (
            f"--tensor-model-parallel-size is {tp}, and a plan has no formula for experts that "
            "choose among the tokens of several ranks: choose 1"
        )
    return None
