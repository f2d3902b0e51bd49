"""An evaluation of a checkpoint on the ranks of a job: what tools/evaluate.py does."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_parallel.collective_errors import agree, on_rank_0, rank_0_first
from moe_parallel.config import Config
from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.data.datasets import blend_sources, held_out_documents
from moe_parallel.data.text_files import read_texts
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.evaluation.documents import DomainLoss, count_windows, evaluate_documents
from moe_parallel.evaluation.model import ReadingModel
from moe_parallel.harness.tasks import (
    PRESETS,
    load_tasks,
    require_harness,
    results_of,
    run_tasks,
    table_of,
)
from moe_parallel.huggingface.export import source_of
from moe_parallel.tool import progress
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.record import read_record
from moe_parallel.training.standalone import evaluation_config, open_model
from moe_parallel.training.text import open_text, open_tokenizer

_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def evaluate(asked: Namespace) -> dict[str, Any]:
    """Evaluates, and prints the results on rank 0. Collective over all ranks.

    torch.distributed is initialized, and its groups are not.

    Args:
        asked: the flags of tools/evaluate.py, `flags` of pretrain_gpt_moe.py, and `wanted` tasks.

    Returns what --output takes. Raises InputError.
    """
    config = agree(lambda: evaluation_config(asked.flags, asked.load, dist.get_world_size()))
    _check_stride(asked, config)
    _check_layout(asked, config)
    tasks = None
    if asked.wanted.tasks:
        agree(lambda: require_harness("--preset" if asked.preset else "--tasks"))
        tasks = rank_0_first(lambda: load_tasks(asked.wanted))  # rank 0 downloads what is missing
    tokenizer = agree(lambda: open_tokenizer(config))
    # Rank 0 scans the token ids; the others read the ranges that it recorded.
    domains = rank_0_first(lambda: _domains(asked, config, tokenizer))
    record = agree(lambda: read_record(find_checkpoint(Path(asked.load))))
    found: dict[str, Any] = {"load": asked.load, "iteration": record["training"]["iteration"]}
    if domains:
        with open_model(config) as model:
            losses = _losses(asked, model, tokenizer, domains)
        found["stride"] = asked.stride or config.training.seq_length
        found["documents"] = {name: _numbers(each) for name, each in losses.items()}
        _say(table_of_documents(losses))
    if tasks is not None:
        found |= _harness(asked, config, tasks)
    if asked.output is not None:
        output = Path(asked.output)
        on_rank_0(lambda: write_atomically(output, json.dumps(found, indent=2, default=str) + "\n"))
    return found


def _check_stride(asked: Namespace, config: Config) -> None:
    length = config.training.seq_length
    if asked.stride is not None and asked.stride > length:
        raise InputError(
            f"--stride is {asked.stride}, above --seq-length {length}: tokens between windows "
            f"would be left out; give at most {length}"
        )


def _check_layout(asked: Namespace, config: Config) -> None:
    """Raises InputError for a divided model, which answers no tasks."""
    for name in _LAYOUT if asked.wanted.tasks else ():
        size = getattr(config.parallel, name)
        if size not in (None, 1):
            raise InputError(
                f"--{name.replace('_', '-')} is {size}, but each rank answers tasks with a whole "
                "model: leave it out, or give an export (tools/export_hf.py) to lm_eval --model hf "
                "--model_args pretrained=FOLDER,parallelize=True"
            )


def _domains(asked: Namespace, config: Config, tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """The documents of each domain, as token ids. Raises InputError for a domain without any."""
    domains: dict[str, list[list[int]]] = {}
    if asked.documents:
        paths = config.data.data_path
        sources = open_text(config).sources if paths is None else blend_sources(
            paths, config.data.split
        )  # fmt: skip
        for source in sources:
            domains[source.domain] = list(held_out_documents(source, tokenizer))
    for file in asked.input:
        texts = list(read_texts(Path(file)))
        name = Path(file).name if Path(file).stem in domains else Path(file).stem
        domains[name] = [ids for ids in tokenizer.tokenize_all(texts) if ids]
    for name, documents in domains.items():
        if not documents:
            raise InputError(f"{name} has no documents to evaluate: leave it out, or add some")
    return {name: documents[: asked.wanted.limit] for name, documents in domains.items()}


def _losses(
    asked: Namespace, model: ReadingModel, tokenizer: Tokenizer, domains: dict[str, list[list[int]]]
) -> dict[str, DomainLoss]:
    length = model.config.training.seq_length
    stride = asked.stride or length
    losses = {}
    for name, documents in domains.items():
        total = count_windows(documents, length, stride)
        with progress(name, total if dist.get_rank() == 0 else 0, "window") as advance:
            losses[name] = evaluate_documents(
                model,
                documents,
                tokenizer.bytes_per_token.tolist(),
                tokenizer.before_text,
                stride,
                asked.batch_size,
                advance if dist.get_rank() == 0 else lambda count: None,
            )
    return losses


def _harness(asked: Namespace, config: Config, tasks: Any) -> dict[str, Any]:
    from moe_parallel.harness.model import HarnessModel  # needs lm_eval

    if asked.preset is not None:
        preset = PRESETS[asked.preset]
        _say("\n".join([preset.source, *(f"- {note}" for note in preset.notes)]))
    dtype = "bfloat16" if config.training.bf16 else "float32"
    lm = agree(lambda: HarnessModel(source_of(asked.load, asked.flags), asked.batch_size, dtype))
    results = run_tasks(lm, tasks, asked.wanted)
    if results is None:  # of rank 0 alone
        return {}
    _say(table_of(results))
    return results_of(results)


def table_of_documents(losses: dict[str, DomainLoss]) -> str:
    """A line for each domain."""
    rows = [("domain", "documents", "tokens", "bits/byte", "nats/token", "perplexity (95%)")]
    for name, each in losses.items():
        perplexity, low, high = each.perplexity
        rows.append(
            (
                name,
                f"{len(each.documents):,}",
                f"{each.whole.tokens:,}",
                _with_margin(each.bits_per_byte.value, each.bits_per_byte.margin),
                _with_margin(each.nats_per_token.value, each.nats_per_token.margin),
                f"{perplexity:.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else ""),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _with_margin(value: float, margin: float | None) -> str:
    return f"{value:.4f}" + ("" if margin is None else f" ± {margin:.4f}")


def _numbers(loss: DomainLoss) -> dict[str, Any]:
    whole = loss.whole
    perplexity, low, high = loss.perplexity
    interval = [low, high] if low < high else None  # one document has none
    return {
        "documents": len(loss.documents),
        "tokens": whole.tokens,
        "bytes": whole.num_bytes,
        "bits_per_byte": loss.bits_per_byte.value,
        "bits_per_byte_margin": loss.bits_per_byte.margin,
        "nats_per_token": loss.nats_per_token.value,
        "nats_per_token_margin": loss.nats_per_token.margin,
        "perplexity": perplexity,
        "perplexity_interval": interval,
    }


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
