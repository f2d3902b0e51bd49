"""Whole models as contenders: the same tokens for all, gradients of every weight, a step.

Ours as `pretrain_gpt_moe.py` trains them, by their command lines; Megatron-Core's own GPTModel with
its MoELayer, without Transformer Engine; and Hugging Face's Mixtral, or Qwen3-MoE from 16 experts
on, with sdpa and each of its experts, of which ours may be one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from moe_parallel import register_experts
from moe_parallel.config import parse_command_line, validate
from moe_parallel.config.selection import aoe_wide_size
from moe_parallel.model.forward import language_model_loss
from moe_parallel.ops.padding import LANES
from moe_parallel.parallel import Groups
from moe_parallel.training.engine import Engine
from tools.bench.measurement import (
    BOTH,
    FORWARD,
    STEP,
    Absent,
    Bench,
    BenchContender,
    Measure,
    Moved,
    invite,
)
from tools.bench.peers.huggingface import FINE_GRAINED, check_memory, model_of
from tools.bench.peers.megatron import moe_config
from tools.bench.sizes import GOALS, GPU, OF_TRANSFORMERS, SMALL, ModelSize

STOCK = "Megatron GPTModel"
IMPLEMENTATIONS = ("grouped_mm", "eager")
EXPERTS = "moe_parallel"  # ours, among those of transformers
NO_LOSSES = ["--moe-aux-loss-coeff", "0"]
BY_BIAS = [*NO_LOSSES, "--moe-router-enable-expert-bias", "true"]
LOW_RANK = 64


@dataclass(frozen=True)
class ModelTerms:
    """What all models of a bench share: sizes, precision, device, the tokens and their labels."""

    size: ModelSize
    dtype: torch.dtype
    groups: Groups
    number_of_batches: int = 1
    device: str = "cpu"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and labels, [B, S] each, in turns: the same for each model."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.size.B, self.size.S + 1)
        batches = []
        for _ in range(self.number_of_batches):
            ids = torch.randint(self.size.V, shape, generator=generator).to(self.device)
            batches.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
        return itertools.cycle(batches)


def contender_of(
    name: str, model: nn.Module, loss: Callable[[], Tensor], step: Callable[[], object]
) -> BenchContender:
    """`loss` runs the forward pass; `step` is a step of the optimizer, which clips its gradients.

    Each model is its own answer: initial weights differ, so losses do.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    device = next(iter(weights.values())).device
    return BenchContender(
        name,
        forward=lambda: [loss()],
        leaves=weights,
        weights=frozenset(weights),
        upstream=(torch.ones((), device=device),),
        answer=name,
        step=step,
        before_step=lambda: _make_gradients(weights.values()),
    )


def _make_gradients(weights: Iterable[Tensor]) -> tuple[()]:
    """Fills gradients, where Megatron-Core or torch looks for them, with a value whose norm every
    step clips."""
    for weight in weights:
        if weight.grad is None and not hasattr(weight, "main_grad"):
            weight.grad = torch.empty_like(weight)
        getattr(weight, "main_grad", weight.grad).fill_(0.1)
    return ()


def number_of_weights(contender: BenchContender) -> int:
    return sum(weight.numel() for weight in contender.leaves.values())


def flags_of(size: ModelSize, dtype: torch.dtype, batches: int) -> list[str]:
    """The flags that all of our models share. `batches`: micro-batches that ranks share out."""
    flags = {
        "num-layers": size.layers,
        "hidden-size": size.d,
        "num-attention-heads": size.heads,
        "num-query-groups": size.key_value_heads,
        "num-experts": size.n,
        "ffn-hidden-size": size.f,
        "moe-ffn-hidden-size": size.f,
        "seq-length": size.S,
        "micro-batch-size": size.B,
        "global-batch-size": size.B * batches,
        "vocab-size": size.V,
        "tokenizer-type": "NullTokenizer",
        "make-vocab-size-divisible-by": 1,
        "untie-embeddings-and-output-weights": "true",
        "bf16": str(dtype == torch.bfloat16).lower(),
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def topk(size: ModelSize, *flags: str) -> list[str]:
    return ["--expert-selection", "topk", "--moe-router-topk", str(size.K), *flags]


def aoe(size: ModelSize, *flags: str) -> list[str]:
    """AoE of as many parameters: d_wide follows from d_low by Eq. 5 of the paper."""
    low_rank = ["--aoe-low-rank-size", str(LOW_RANK)]
    if size.readable_widths:
        wide = aoe_wide_size(size.d, size.f, LOW_RANK)
        low_rank += ["--aoe-wide-size", str(wide - wide % LANES)]
    chosen = ["--moe-router-topk", str(size.K)]
    return ["--expert-selection", "aoe", *low_rank, *chosen, *flags]


def top_p(*flags: str) -> list[str]:
    return ["--expert-selection", "top_p", *flags]


def lory(size: ModelSize) -> list[str]:
    segment = min(256, size.S)  # 256 is the default
    return ["--expert-selection", "lory", "--lory-segment-length", str(segment)]


def our_model(name: str, selection: list[str], terms: ModelTerms) -> BenchContender:
    """Trains with every default of the program, except the layout of one process."""
    return engine_model(name, engine_of(selection, terms), terms)


def engine_of(selection: list[str], terms: ModelTerms) -> Engine:
    """Our model in the layout of `terms`, with the flags of its selection."""
    dp = terms.groups.dp.size()
    config = parse_command_line([*flags_of(terms.size, terms.dtype, dp), *selection])
    validate(config, world_size=dist.get_world_size())
    return Engine(config, terms.size.V, terms.groups)


def engine_model(name: str, engine: Engine, terms: ModelTerms) -> BenchContender:
    """An engine's model on this rank."""
    size = terms.size
    (model,) = engine.chunks
    model.train()
    batches = terms.batches()
    mask_BS = torch.ones(size.B, size.S, device=terms.device)
    positions_BS = torch.arange(size.S, device=terms.device).expand(size.B, -1)

    def loss() -> Tensor:
        tokens_BS, labels_BS = next(batches)
        losses_BS = model(tokens_BS, positions_BS, None, labels=labels_BS, loss_mask=mask_BS)
        batch = {"loss_mask": mask_BS, "counted": mask_BS.sum()}
        return language_model_loss(losses_BS, batch)[0]

    return contender_of(name, model, loss, engine.optimizer.step)


def stock_model(terms: ModelTerms) -> BenchContender:
    size = terms.size
    config = moe_config(
        size,
        terms.dtype,
        num_layers=size.layers,
        num_attention_heads=size.heads,
        num_query_groups=size.key_value_heads,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=size.n, normalization="RMSNorm"),
        vocab_size=size.V,
        max_sequence_length=size.S,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    gpt.to(terms.device)  # the norms are made on the CPU
    chunk = Float16Module(config, gpt) if config.bf16 else gpt
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, chunk)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=config.bf16, params_dtype=terms.dtype
        ),
        [model],
    )
    positions_BS = torch.arange(size.S, device=terms.device).expand(size.B, -1)
    square = torch.ones(1, 1, size.S, size.S, dtype=torch.bool, device=terms.device)
    causal_SS = square.triu(1)  # True: is not seen

    batches = terms.batches()

    def loss() -> Tensor:
        tokens_BS, labels_BS = next(batches)
        losses_BS: Tensor = model(tokens_BS, positions_BS, causal_SS, labels=labels_BS)
        return losses_BS.float().mean()

    return contender_of(STOCK, model, loss, optimizer.step)


def name_of(terms: ModelTerms, implementation: str) -> str:
    return f"{model_of(terms.size.n)} {implementation}"


def hugging_face_model(terms: ModelTerms, implementation: str, model: Any = None) -> BenchContender:
    """`model`: one that takes turns in using several implementations; None: its own."""
    if model is None:
        model = _model(terms, implementation)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    batches = terms.batches()

    def loss() -> Tensor:
        tokens_BS, _ = next(batches)
        model.set_experts_implementation(implementation)
        # The model shifts the labels itself, so it predicts one token less of each sequence.
        found: Tensor = model(input_ids=tokens_BS, labels=tokens_BS).loss
        return found

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return contender_of(name_of(terms, implementation), model, loss, step)


def _model(terms: ModelTerms, implementation: str) -> Any:
    with torch.device(terms.device):
        return _built(terms.size, implementation).to(terms.dtype).train()


def _built(size: ModelSize, implementation: str) -> Any:
    common = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.d,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "head_dim": size.d // size.heads,
        "vocab_size": size.V,
        "num_experts_per_tok": size.K,
        "max_position_embeddings": size.S,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "experts_implementation": implementation,
    }
    if size.n >= FINE_GRAINED:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        experts = {"num_experts": size.n, "moe_intermediate_size": size.f, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts))

    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": size.n, "intermediate_size": size.f}
    return MixtralForCausalLM(MixtralConfig(**common, **experts))


def against_others(terms: ModelTerms) -> Bench:
    """Our systems, Megatron-Core's stock model, and Hugging Face's; no auxiliary losses."""
    size = terms.size
    systems = {
        "ours, topk": topk(size, *NO_LOSSES),
        "ours, aoe": aoe(size, *NO_LOSSES),
        "ours, top_p": top_p(*NO_LOSSES),
        "ours, lory": lory(size),
    }
    ours = [our_model(name, flags, terms) for name, flags in systems.items()]
    peers = [invite(STOCK, partial(stock_model, terms))]
    peers += _hugging_face(terms, IMPLEMENTATIONS)
    return _bench("model", terms, ours, peers)


def curve(terms: ModelTerms) -> Bench:
    """Ours and the fastest peer."""
    ours = [
        our_model("ours, topk", topk(terms.size, *NO_LOSSES), terms),
        our_model("ours, aoe", aoe(terms.size, *NO_LOSSES), terms),
    ]
    peers = _hugging_face(terms, IMPLEMENTATIONS[:1])
    return _bench("model", terms, ours, peers)


def of_transformers(terms: ModelTerms) -> Bench:
    """A model of transformers with our experts, and with each of its own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    own = ["eager", *sorted({*ALL_EXPERTS_FUNCTIONS.valid_keys()} - {EXPERTS})]
    register_experts()
    size, model = terms.size, _model(terms, EXPERTS)
    expert_bytes = 3 * size.d * size.f * terms.dtype.itemsize

    def peer(implementation: str) -> BenchContender:
        check_memory(implementation, size.tokens * size.K, expert_bytes, terms.device)
        return hugging_face_model(terms, implementation, model)

    peers = [invite(name_of(terms, each), partial(peer, each)) for each in own]
    ours = [hugging_face_model(terms, EXPERTS, model)]
    bench = _bench("model of transformers", terms, ours, peers)
    return replace(bench, measures=bench.measures[:2])  # not the optimizer, which is the same


_GATE = ("--aoe-recompute-gate", "false")


def aoe_with_losses(terms: ModelTerms) -> Bench:
    """AoE and topk of as many parameters, both with the auxiliary loss."""
    loss = ("--moe-aux-loss-coeff", "0.01")
    scores = ("--aoe-recompute-scores", "false")
    variants = {"": (), ", scores kept": scores, ", scores and gate kept": (*scores, *_GATE)}
    ours = [our_model("topk, aux loss", topk(terms.size, *loss), terms)]
    ours += [
        our_model(f"aoe, aux loss, full gradient{kept}", aoe(terms.size, *loss, *flags), terms)
        for kept, flags in variants.items()
    ]
    return _bench("model with aux loss", terms, ours, [])


def aoe_by_bias(terms: ModelTerms) -> Bench:
    """The same balanced by bias, where the selected gradient is exact."""
    selected = aoe(terms.size, *BY_BIAS, "--aoe-gradient", "selected")
    ours = [
        our_model("topk, by bias", topk(terms.size, *BY_BIAS), terms),
        our_model("aoe, by bias, selected gradient", selected, terms),
        our_model("aoe, by bias, selected gradient, gate kept", [*selected, *_GATE], terms),
    ]
    return _bench("model balanced by bias", terms, ours, [])


_EVERY = [against_others, aoe_with_losses, aoe_by_bias]
BENCHES: dict[str, list[Callable[[ModelTerms], Bench]]] = {
    SMALL: _EVERY,
    GOALS: _EVERY,
    GPU: [*_EVERY, of_transformers],
    OF_TRANSFORMERS: [of_transformers],
    "sequence": [curve],
    "experts": [curve],
    "micro-batch": [curve],
}


def _hugging_face(
    terms: ModelTerms, implementations: tuple[str, ...]
) -> list[BenchContender | Absent]:
    return [
        invite(name_of(terms, implementation), partial(hugging_face_model, terms, implementation))
        for implementation in implementations
    ]


def _bench(
    op: str, terms: ModelTerms, ours: list[BenchContender], peers: list[BenchContender | Absent]
) -> Bench:
    products = terms.size.products()
    measures = [Measure(FORWARD, products), Measure(BOTH, products.with_gradients())]
    if terms.dtype == torch.float32:
        # In bf16 Hugging Face's optimizer has no fp32 weights, so its work is another.
        # Adam reads and writes weights and two moments, and reads gradients: 7 values of 4 bytes.
        measures.append(Measure(STEP, Moved(7 * 4 * number_of_weights(ours[0]))))
    return Bench(op, terms.size, terms.dtype, ours, peers, tuple(measures))
