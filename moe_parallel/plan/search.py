"""All layouts of a configuration on a cluster: those that fit, ranked, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from moe_parallel.config import Config, validate
from moe_parallel.config.run import EMBEDDED_VOCAB_SIZE
from moe_parallel.errors import InputError
from moe_parallel.ops import extension
from moe_parallel.plan.cluster import RESERVE, Cluster
from moe_parallel.plan.layout import Layout, layout_of
from moe_parallel.plan.stage import Memory, Model, memory_of_stage
from moe_parallel.plan.step_time import StepTime, step_time

MICRO_BATCHES = (1, 2, 4, 8, 16)
#: Context parallelism leaves a rank at least so many tokens of a sequence.
LEAST_SHARE = 4096


@dataclass(frozen=True)
class Plan:
    """A layout that fits."""

    model: Model
    layout: Layout
    memory: Memory  # of the stage that needs most
    stage: int
    time: StepTime


@dataclass(frozen=True)
class Refused:
    """A layout that is not possible."""

    layout: Layout
    kind: str  # what many layouts have in common
    reason: str


def plannable(config: Config, mean_choices: float | None = None) -> None:
    """Raise InputError for what a plan cannot know, because it has no data."""
    if not extension.is_built():
        raise InputError("a plan counts what the C++ extension does: build it with make set-up")
    if torch.cuda.is_available():
        raise InputError("a plan is made without a GPU: set CUDA_VISIBLE_DEVICES to nothing")
    if config.moe.num_experts is None:
        if mean_choices is not None:
            raise InputError(f"--mean-choices is {mean_choices}, but there are no experts")
        return
    selection, n = config.selection, config.num_experts
    if mean_choices is not None and selection.choices_per_token and not selection.free_experts:
        raise InputError(
            f"--mean-choices is {mean_choices}, but the configuration says how many experts a "
            "token has: leave it out"
        )
    if mean_choices is not None and not 0 < mean_choices <= n:
        raise InputError(
            f"--mean-choices is {mean_choices}: it must be above 0 and at most --num-experts {n}"
        )
    if mean_choices is None and selection.mean_choices is None:
        raise InputError(
            f"--expert-selection is {selection.system}, and only training tells how many experts a "
            "token has: set --mean-choices to experts_per_token of a run's metrics.jsonl"
        )


def mean_of(config: Config, mean_choices: float | None) -> float | None:
    """The mean number of experts of a token: the given one, or that of the configuration."""
    if config.moe.num_experts is None or mean_choices is not None:
        return mean_choices
    return config.selection.mean_choices


def vocabulary_of(config: Config) -> int:
    """Of the model. Raises InputError if only a tokenizer tells it, because a plan reads none."""
    if config.data.vocab_size is None and config.data.data_path is not None:
        raise InputError("--vocab-size is not set: a plan reads no tokenizer, so give its size")
    return config.data.vocab_size or EMBEDDED_VOCAB_SIZE


def model_of(
    config: Config, vocab_size: int, ranks: int, mean_choices: float | None = None
) -> Model:
    """The measured model of a valid configuration on this number of ranks."""
    vocabulary = config.padded_vocab_size(vocab_size)
    return Model.of(config, layout_of(config, ranks), vocabulary, mean_of(config, mean_choices))


def plan_layout(
    config: Config,
    vocab_size: int,
    cluster: Cluster,
    reserve: int = RESERVE,
    mean_choices: float | None = None,
) -> Plan | Refused:
    """The plan of a configuration in its own layout.

    Args:
        reserve: bytes of a GPU that stay free.
        mean_choices: the mean number of experts of a token, if the configuration does not say it.
    """
    plannable(config, mean_choices)
    layout = layout_of(config, cluster.ranks)
    try:
        validate(config, cluster.ranks)
    except InputError as error:
        return Refused(layout, "sizes that do not divide each other", str(error))
    model = model_of(config, vocab_size, cluster.ranks, mean_choices)
    stages = layout.unlike_stages(config.moe_layers)
    memories = {stage: memory_of_stage(model, stage) for stage in stages}
    stage = max(memories, key=lambda each: memories[each].total)
    free, needed = round(cluster.node.memory_size) - reserve, memories[stage].total
    if needed > free:
        over = (needed - free) / 2**30
        reason = (
            f"stage {stage} needs {needed / 2**30:.1f} GiB, {over:.1f} more than the "
            f"{free / 2**30:.1f} that a GPU has after its reserve"
        )
        return Refused(layout, "more memory than a GPU has", reason)
    vocabulary, mean = config.padded_vocab_size(vocab_size), mean_of(config, mean_choices)
    time = step_time(model, cluster, vocabulary, mean)
    return Plan(model, layout, memories[stage], stage, time)


def search(
    config: Config,
    vocab_size: int,
    cluster: Cluster,
    reserve: int = RESERVE,
    mean_choices: float | None = None,
) -> tuple[list[Plan], list[Refused]]:
    """All layouts of `layouts`: those that fit, fastest first, and the others.

    Recomputation is tried where the same sizes do not fit without it. The arguments are those of
    `plan_layout`.
    """
    plans, refused = [], []
    fits: set[Layout] = set()
    for candidate in layouts(config, cluster):
        layout = layout_of(candidate, cluster.ranks)
        if replace(layout, recompute=False, recompute_modules=()) in fits:
            continue
        found = plan_layout(candidate, vocab_size, cluster, reserve, mean_choices)
        if isinstance(found, Plan):
            plans.append(found)
            fits.add(layout)
        else:
            refused.append(found)
    plans.sort(key=lambda plan: (-plan.time.tokens_per_gpu, plan.memory.total))
    return plans, refused


def reasons(refused: list[Refused]) -> dict[str, tuple[int, str]]:
    """By kind: how many layouts were refused, and the reason of the last one."""
    counts = Counter(each.kind for each in refused)
    return {each.kind: (counts[each.kind], each.reason) for each in refused}


def layouts(config: Config, cluster: Cluster) -> Iterator[Config]:
    """The configuration with each tp, cp, pp, vpp, ep, etp, micro-batch and recomputation.

    tp x cp stays in a node, and a rank has LEAST_SHARE tokens of a sequence or all. Recomputation
    is none, full, and that of the configuration. Sequence parallelism is on with tp. Adam's state
    is divided, and gradients and weights overlap. Sizes that do not divide each other are
    left in, so that the reason is told, but no size exceeds the number of ranks. If a step is a
    CUDA graph, the model is not divided, and nothing is recomputed or overlaps.
    """
    layers, n = config.model.num_layers, config.moe.num_experts
    own = config.training
    granularities = dict.fromkeys((None, "full", own.recompute_granularity))
    divided = config.optimizer.optimizer == "adam"
    whole = own.uses_cuda_graph  # each GPU then holds the model, and nothing overlaps
    sizes = product(
        _tp_and_cp(config, cluster),
        [pp for pp in _divisors(layers) if pp <= cluster.ranks],
        _divisors(n) if n else [1],
        (False, True) if n else (False,),
        [size for size in MICRO_BATCHES if size <= config.training.global_batch_size],
        granularities,
    )
    for (tp, cp), pp, ep, whole_experts, micro_batch, recompute in sizes:
        if whole_experts and tp == 1:
            continue
        if whole and (tp * cp * pp * ep > 1 or recompute is not None):
            continue
        for each in _chunk_sizes(layers, pp):
            parallel = replace(
                config.parallel,
                tensor_model_parallel_size=tp,
                context_parallel_size=cp,
                sequence_parallel=tp > 1,
                pipeline_model_parallel_size=pp,
                num_layers_per_virtual_pipeline_stage=each,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=(1 if whole_experts else tp) if n else None,
                use_distributed_optimizer=divided,
                overlap_grad_reduce=not whole,
                overlap_param_gather=not whole and divided,
            )
            modules = own.recompute_modules if recompute == "selective" else None
            training = replace(
                own,
                micro_batch_size=micro_batch,
                recompute_granularity=recompute,
                recompute_modules=modules,
            )
            yield replace(config, parallel=parallel, training=training)


def _tp_and_cp(config: Config, cluster: Cluster) -> list[tuple[int, int]]:
    most = config.training.seq_length // LEAST_SHARE
    powers = _powers(cluster.node.gpus)
    sizes = [(tp, cp) for tp in powers for cp in powers if tp * cp <= cluster.node.gpus]
    return [(tp, cp) for tp, cp in sizes if cp == 1 or cp <= most]


def _chunk_sizes(layers: int, pp: int) -> list[int | None]:
    """Layers of a virtual stage: None, and each size that makes two stages or more of a rank."""
    if pp == 1 or layers % pp:
        return [None]
    of_rank = layers // pp
    return [None, *(size for size in _divisors(of_rank) if size < of_rank)]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
