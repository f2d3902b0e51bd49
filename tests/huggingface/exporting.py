"""Checkpoints of models that nobody trained, what they compute, and their exports."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.balancing.bias import ExpertBias
from moe_parallel.config import Config, parse_command_line
from moe_parallel.huggingface.export import Exported, ExportOptions, ExportSource, export
from moe_parallel.model.gpt import build_model
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.platform.device import device
from moe_parallel.systems.hash.rule import HashTable
from moe_parallel.telemetry.statistics import RoutingStatistics
from moe_parallel.training.checkpoint.checkpointer import TrainingState
from moe_parallel.training.run_folder import begin_run, open_checkpoints
from moe_parallel.training.standalone import standalone_config, standalone_model, vocab_size_of
from moe_parallel.training.text import open_tokenizer
from tests.data.small_text import small_bpe
from tests.program import SMALL, flags, pretrain_here

PROMPT = [3, 70, 41, 219, 4, 88, 130, 7, 260, 15, 33]
STEPS = 8  # tokens that are generated
#: Weights so large that the experts matter, and a vocabulary that is padded.
STRONG = {"init_method_std": 0.25}


def save_runs(runs: Iterable[tuple[Path, dict[str, Any]]]) -> list[tuple[torch.Tensor, list[int]]]:
    """On each rank of a world: save a model for each folder and its options, and use it.

    Returns the logits of the prompt, [S, V] without padding, and the tokens that are generated
    after it; on one rank alone, otherwise nothing.
    """
    return [_save_run(folder, options) for folder, options in runs]


def _save_run(folder: Path, options: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    tokenizer = small_bpe()
    config = parse_command_line(flags(SMALL | STRONG | options | {"save": folder}))
    groups = initialize_groups(config.parallel)
    model_parallel_cuda_manual_seed(config.training.seed)
    statistics = RoutingStatistics(config.model.num_layers, config.moe.num_experts or 1, device())
    size = config.padded_vocab_size(tokenizer.vocab_size)
    chunks = build_model(config, size, groups, statistics)
    for chunk in chunks:
        _disturb(chunk)
    begin_run(config, tokenizer)
    checkpoints = open_checkpoints(config, tokenizer.vocab_size, groups, tokenizer)
    checkpoints.save(TrainingState(4, 32, 1024), chunks, None, None)
    alone = torch.distributed.get_world_size() == 1
    used = _use(chunks[0], tokenizer.vocab_size) if alone else (torch.empty(0), [])
    destroy_groups()
    return used


def train_in_bf16(options: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """On one rank: train a run in bf16, and use the model of its checkpoint that tools load."""
    ((code, printed),) = pretrain_here([options | {"bf16": True}])
    assert code == 0, printed
    source = source_of(options["save"])
    groups = initialize_groups(source.config.parallel)
    model_parallel_cuda_manual_seed(1)
    model, _ = standalone_model(source.config, source.vocab_size, groups)
    used = _use(model, source.tokenizer.vocab_size)
    destroy_groups()
    return used


@torch.no_grad()
def _disturb(chunk: torch.nn.Module) -> None:
    """Give norms, biases and tables values that show whether they are exported."""
    for name, parameter in chunk.named_parameters():
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.3 * torch.arange(len(parameter)).sin())
        if name.endswith("bias"):
            parameter.copy_(0.3 * torch.arange(len(parameter)).cos())
    for module in chunk.modules():
        if isinstance(module, ExpertBias):
            module.bias_E += 0.5 * torch.arange(len(module.bias_E)).cos()  # cutoffs start elsewhere
    tables = [module.experts_VK for module in chunk.modules() if isinstance(module, HashTable)]
    for number, table in enumerate(tables, 1):
        turns_V1 = torch.arange(len(table))[:, None] // 5  # so that the rows do not repeat soon
        table.copy_((table + turns_V1 + number) % SMALL["num_experts"])


@torch.no_grad()
def _use(model: Any, vocab_size: int) -> tuple[torch.Tensor, list[int]]:
    """The logits of the prompt, and what follows it, always the most probable token."""
    model.eval()

    def logits_of(tokens: list[int]) -> torch.Tensor:
        positions = torch.arange(len(tokens))[None]
        return model(torch.tensor([tokens]), positions, None)[0, :, :vocab_size]

    logits, tokens = logits_of(PROMPT).clone(), list(PROMPT)
    for _ in range(STEPS):
        tokens.append(int(logits_of(tokens)[-1].argmax()))
    return logits, tokens[len(PROMPT) :]


def source_of(run: Path) -> ExportSource:
    """The newest checkpoint of a run."""
    config: Config = standalone_config([], load=str(run))
    (checkpoint,) = run.glob("iter_*")
    return ExportSource(checkpoint, config, vocab_size_of(config), open_tokenizer(config))


def export_run(run: Path, output: Path, **options: Any) -> Exported:
    """As tools/export_hf.py does."""
    return export(source_of(run), output, ExportOptions(**options))
