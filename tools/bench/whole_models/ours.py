"""Our models as `pretrain_gpt_moe.py` trains them, by their command lines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moe_parallel.config import parse_command_line, validate
from moe_parallel.config.selection import aoe_wide_size
from moe_parallel.model.forward import language_model_loss
from moe_parallel.ops.padding import LANES
from moe_parallel.training.engine import Engine
from tools.bench.contender import BenchContender
from tools.bench.whole_models.model import ModelTerms, contender_of
from tools.bench.whole_models.sizes import ModelSize

NO_LOSSES = ["--moe-aux-loss-coeff", "0"]
BY_BIAS = [*NO_LOSSES, "--moe-router-enable-expert-bias", "true"]
LOW_RANK = 64


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
    return model_of(name, engine_of(selection, terms), terms)


def engine_of(selection: list[str], terms: ModelTerms) -> Engine:
    """Our model in the layout of `terms`, with the flags of its selection."""
    dp = terms.groups.dp.size()
    config = parse_command_line([*flags_of(terms.size, terms.dtype, dp), *selection])
    validate(config, world_size=dist.get_world_size())
    return Engine(config, terms.size.V, terms.groups)


def model_of(name: str, engine: Engine, terms: ModelTerms) -> BenchContender:
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
