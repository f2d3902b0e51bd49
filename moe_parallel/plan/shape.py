"""The sizes of a model and of its sequences, from which everything else is computed."""

from __future__ import annotations

from dataclasses import dataclass

from moe_parallel.config import Config
from moe_parallel.config import selection as selections
from moe_parallel.config.data import EMBEDDED_VOCAB_SIZE
from moe_parallel.config.selection.kept import Scoring, Target
from moe_parallel.errors import InputError
from moe_parallel.plan.experts import (
    PlannedExperts,
    aoe_weights,
    experts_of,
    swiglu_weights,
)

__all__ = [
    "PlannedExperts", "Scoring", "Shape", "aoe_weights", "no_formula", "plannable", "shape_of",
    "swiglu_weights", "target_of",
]  # fmt: skip


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). This program does not train it.

    Queries, and keys with values, are products of two matrices each. A part of a head's query and
    key is turned by RoPE, and this part of the keys is the same for all heads.
    """

    queries: int  # inner width of the queries
    keys: int  # inner width of keys and values
    plain: int  # of a head's query and key, without RoPE
    turned: int  # with RoPE
    values: int  # of a head

    @property
    def inner(self) -> int:
        """The numbers of a token between the two products."""
        return self.queries + self.keys + self.turned


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
    experts: PlannedExperts | None = None
    fused_softmax: bool = False  # the loss's softmax has no copy of the logits in fp32
    loss_chunk: int = 2048  # tokens whose logits exist at a time
    fp8_linear: bool = False  # attention's and dense products in FP8
    fp8_experts: bool = False  # experts' products in FP8
    # In software other than this program:
    latent: Latent | None = None  # latent attention
    further: int = 0  # layers like the last one that predict a further token, each with a head
    seen: float = 1.0  # the share of the causal S x S scores that windows leave

    @property
    def value(self) -> int:
        """Bytes of a weight and of an activation."""
        return 2 if self.bf16 else 4

    @property
    def packed_row(self) -> int:
        """The bytes of a token that is sent to an expert: with its prob and, if it is sent, C, in
        multiples of 16 (ops/packed_rows.py)."""
        norms = None if self.experts is None else self.experts.norms
        of_c = norms.rank if norms is not None and norms.sends_c else 0
        return -(-((self.hidden + of_c) * self.value + 4) // 16) * 16

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.groups) * self.head_width


def shape_of(config: Config, vocab_size: int, mean_choices: float | None = None) -> Shape:
    """The shape of any configuration. `plannable` says whether a whole plan is possible.

    `mean_choices`: the mean number of experts of a token, if the configuration says none or a
    target only.
    """
    model, training = config.model, config.training
    vocabulary = config.padded_vocab_size(vocab_size)
    return Shape(
        moe_layers=config.moe_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        groups=model.query_groups,
        head_width=model.head_width,
        dense_width=model.ffn_hidden_size,
        vocabulary=vocabulary,
        tied=not model.untie_embeddings_and_output_weights,
        seq_length=training.seq_length,
        bf16=training.bf16,
        experts=None
        if config.moe.num_experts is None
        else experts_of(config, vocabulary, mean_choices),
        fused_softmax=True,
        loss_chunk=training.tokens_of_loss_chunk("cuda"),
        fp8_experts=config.fp8.fp8_format is not None,
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
            "formula for S x S scores: choose auto, flash, fused or transformer_engine"
        )
    for flag in ("qk_layernorm", "add_qkv_bias"):
        if getattr(config.model, flag):
            raise InputError(
                f"--{flag.replace('_', '-')} is true, and a plan has no formula for it: leave it "
                "out of the plan"
            )
    if config.moe.num_experts is None:
        return
    selection, parts = config.selection, config.parallel.moe_dispatch_parts
    _plannable_system(selection)
    without: dict[str, object] = {
        "--moe-input-jitter-eps": getattr(selection, "moe_input_jitter_eps", None),
        "--moe-importance-loss-coeff": getattr(selection, "moe_importance_loss_coeff", None),
        "--aoe-fp8-screening": getattr(selection, "aoe_fp8_screening", None),
        "--moe-expert-capacity-factor": config.moe.moe_expert_capacity_factor,
        "--moe-activation-budget": config.moe.moe_activation_budget,
        "--moe-dispatch-parts": parts if parts > 1 else None,
        "--moe-router-force-routing": getattr(selection, "moe_router_force_routing", None),
        "--moe-router-replay": getattr(selection, "moe_router_replay", None),
    }
    if without["--moe-router-force-routing"] == "balanced":
        del without["--moe-router-force-routing"]  # what a plan assumes
    for name, value in without.items():
        if value:
            raise InputError(
                f"{name} is {value}, and a plan has no formula for it: leave it out of the plan"
            )
    known = selection.mean_choices is not None or target_of(config) is not None
    if not known and mean_choices is None:
        raise InputError(
            f"--expert-selection is {selection.system}, which gives tokens different numbers of "
            "experts: set --mean-choices to experts_per_token of a run's metrics.jsonl"
        )


def _plannable_system(selection: selections.Selection) -> None:
    if selection.kept_by_rule() is None:
        raise InputError(
            f"--expert-selection is {selection.system}, and a plan has formulas only for systems "
            "that dispatch single tokens: plan topk, aoe or a dense model of the same sizes"
        )


def vocabulary_of(config: Config) -> int:
    """Of the model. Raises InputError if only a tokenizer tells it, because a plan reads none."""
    if config.data.vocab_size is None and config.data.data_path is not None:
        raise InputError("--vocab-size is not set: a plan reads no tokenizer, so give its size")
    return config.data.vocab_size or EMBEDDED_VOCAB_SIZE


def target_of(config: Config) -> Target | None:
    """The mean number of experts per token at which training aims.

    None: the number is fixed, or nothing holds it.
    """
    if config.moe.num_experts is None:
        return None
    return config.selection.target_choices(config.num_experts)


def no_formula(config: Config) -> str | None:
    """Why a plan does not describe the configuration's layout, where it describes others."""
    tp = config.parallel.tensor_model_parallel_size
    dense = config.moe.num_experts is None
    if tp > 1 and not dense and config.selection.experts_take is not None:
        return (
            f"--tensor-model-parallel-size is {tp}, and a plan has no formula for experts that "
            "choose among the tokens of several ranks: choose 1"
        )
    return None
