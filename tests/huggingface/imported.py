"""Run folders of imported models, and what they compute in a world of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from moe_parallel.config import parse_command_line
from moe_parallel.huggingface.importing import import_folder, plan_import
from moe_parallel.model.forward import run_micro_batches
from moe_parallel.model.gpt import build_model
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.telemetry.statistics import RoutingStatistics
from moe_parallel.training.run_folder import open_checkpoints
from moe_parallel.training.standalone import vocab_size_of
from tests.huggingface.models import LENGTH, Saved
from tests.program import Options, flags

WITHOUT_TEXT = ["--tokenizer-type", "NullTokenizer"]


def run_of(saved: Saved, output: Path, more: list[str] | None = None) -> Path:
    """The run folder of an imported model without a tokenizer."""
    import_folder(plan_import(saved.folder, WITHOUT_TEXT + (more or [])), output)
    return output


def logits_here(run: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    """The logits of a run's model on a world of one rank: [B, S, V]."""
    chunks, config, vocab_size = _loaded(run, {})
    positions = torch.arange(tokens_BS.shape[1]).expand(len(tokens_BS), -1)
    with torch.no_grad():
        logits: torch.Tensor = chunks[0](tokens_BS, positions, None)
    destroy_groups()
    return logits[..., :vocab_size].float()


def losses_here(run: Path, tokens_BS: torch.Tensor, layout: Options) -> torch.Tensor | None:
    """The loss of each token but the first, in a layout: [B, S - 1]; None on earlier stages."""
    chunks, config, _ = _loaded(run, layout)
    batch = {
        "tokens": tokens_BS[:, :-1],
        "labels": tokens_BS[:, 1:],
        "position_ids": torch.arange(tokens_BS.shape[1] - 1).expand(len(tokens_BS), -1),
        "loss_mask": torch.ones(len(tokens_BS), tokens_BS.shape[1] - 1),
    }
    reported = run_micro_batches(
        chunks,
        iter([batch]),
        config.training,
        1,
        lambda losses_BS, _: (losses_BS.mean(), {"losses": losses_BS}),
        forward_only=True,
    )
    destroy_groups()
    return reported[0]["losses"] if reported else None


def _loaded(run: Path, layout: Options) -> tuple[list[Any], Any, int]:
    """The chunks of the model on this rank, its configuration and its vocabulary."""
    given = {"load": run, "micro_batch_size": 2, "seq_length": LENGTH - 1, "bf16": False}
    given |= layout
    config = parse_command_line(["--config", str(run / "config.yaml"), *flags(given)])
    groups = initialize_groups(config.parallel, config.virtual_stages)
    model_parallel_cuda_manual_seed(1)
    vocab_size = vocab_size_of(config)
    layers, experts = config.model.num_layers, config.moe.num_experts or 1
    statistics = RoutingStatistics(layers, experts, torch.device("cpu"))
    chunks = build_model(config, config.padded_vocab_size(vocab_size), groups, statistics)
    open_checkpoints(config, vocab_size, groups).load(run, chunks, None, None)
    for chunk in chunks:
        chunk.eval()
    return chunks, config, vocab_size
