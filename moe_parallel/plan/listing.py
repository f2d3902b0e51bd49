"""The plans of a configuration on a cluster, for a user to choose from: a table, or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.search import (
    Plan,
    Refused,
    mean_of,
    plan_layout,
    reasons,
    search,
    vocabulary_of,
)
from moe_parallel.plan.stage import Model, memory_of_stage, messages_of_stage

GIB = 2**30

TABLE_HEADER = (
    "   tp cp pp vpp  ep etp   dp  mb recompute  tokens/s/GPU  TFLOP/s  step s    GiB"
    "  weights grads  optim   kept"
)


@dataclass(frozen=True)
class Listing:
    """The plans of a configuration."""

    config: Config
    cluster: Cluster
    mean_choices: float | None  # of a token; None: the configuration says it
    plans: list[Plan]  # fastest first
    refused: list[Refused]
    fitting: int  # the number of layouts that fit, of which `plans` may be the first

    @classmethod
    def of(
        cls,
        config: Config,
        cluster: Cluster,
        reserve: int,
        mean_choices: float | None = None,
        *,
        own_layout: bool = False,
        most: int,
    ) -> Listing:
        """Plans a configuration.

        Args:
            reserve: bytes of a GPU that stay free.
            own_layout: only the layout of the configuration; otherwise every layout is tried.
            most: the number of plans in the listing.

        Raises InputError if the configuration cannot be planned.
        """
        vocabulary = vocabulary_of(config)
        refused: list[Refused] = []
        if own_layout:
            plans = [_own_plan(config, vocabulary, cluster, reserve, mean_choices)]
        else:
            plans, refused = search(config, vocabulary, cluster, reserve, mean_choices)
        return cls(config, cluster, mean_choices, plans[:most], refused, len(plans))


def _own_plan(
    config: Config, vocabulary: int, cluster: Cluster, reserve: int, mean_choices: float | None
) -> Plan:
    found = plan_layout(config, vocabulary, cluster, reserve, mean_choices)
    if isinstance(found, Refused):
        raise InputError(f"the layout is not possible: {found.reason}")
    return found


def listing_table(listing: Listing) -> str:
    """The table, with what it is of above it and the refused layouts below it."""
    return _of_experts(listing) + "".join(f"{line}\n" for line in _lines(listing))


def _lines(listing: Listing) -> Iterator[str]:
    training, plans = listing.config.training, listing.plans
    yield (
        f"{listing.cluster.text}; {training.global_batch_size} sequences of "
        f"{training.seq_length} tokens a step\n"
    )
    if plans:
        yield TABLE_HEADER
        yield from map(_row, plans)
        yield "\nthe first, share of the step: " + _shares(plans[0])
    yield f"\n{listing.fitting} of {listing.fitting + len(listing.refused)} layouts fit"
    for kind, (count, reason) in reasons(listing.refused).items():
        yield f"{count:6,} need {kind}" if "memory" in kind else f"{count:6,} have {kind}"
        yield f"       for example {_last_of(listing.refused, kind)}: {reason}"


def _last_of(refused: list[Refused], kind: str) -> str:
    """The sizes of the last layout that was refused for a reason of this kind."""
    layout: Layout = [each.layout for each in refused if each.kind == kind][-1]
    recompute = layout.recompute_granularity
    return (
        f"tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, vpp {layout.virtual}, ep {layout.ep}, "
        f"etp {layout.etp}, micro-batch {layout.micro_batch}"
        + (f", {recompute} recomputation" if recompute else "")
    )


def _row(plan: Plan) -> str:
    at, memory, time = plan.layout, plan.memory, plan.time
    return (
        f"  {at.tp:3}{at.cp:3}{at.pp:3}{at.virtual:4}{at.ep:4}{at.etp:4}{at.dp:5}"
        f"{at.micro_batch:4} {at.recompute_granularity or 'none':>9}{time.tokens_per_gpu:14,.0f}"
        f"{time.flops_per_gpu / 1e12:9.0f}{time.seconds:8.2f}{memory.total / GIB:7.1f}"
        f"{memory.weights / GIB:9.1f}{memory.gradients / GIB:6.1f}{memory.optimizer / GIB:7.1f}"
        f"{memory.activations / GIB:7.1f}"
    )


def _shares(plan: Plan) -> str:
    parts = sorted(plan.time.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / plan.time.seconds:.1%}" for name, seconds in parts)


def _of_experts(listing: Listing) -> str:
    """For which number of experts the plan is, if training decides it; else ""."""
    config, mean = listing.config, mean_of(listing.config, listing.mean_choices)
    if mean is None or (config.selection.choices_per_token and not config.selection.free_experts):
        return ""
    if listing.mean_choices is not None:
        return f"--mean-choices: {mean:g} a token\n"
    return (
        f"training decides the number of experts per token: the plan is for {mean:g}, at which it "
        "aims (--mean-choices plans another number)\n"
    )


def listing_json(listing: Listing) -> dict[str, Any]:
    """The listing as an object for JSON, with the memory and the messages of every stage."""
    config, cluster = listing.config, listing.cluster
    return {
        "cluster": asdict(cluster) | {"gpus": cluster.ranks},
        "plans": [_plan(listing, plan) for plan in listing.plans],
        "refused": [asdict(each) for each in listing.refused],
        "experts_per_token": mean_of(config, listing.mean_choices),
    }


def _plan(listing: Listing, plan: Plan) -> dict[str, Any]:
    model, layout = plan.model, plan.layout
    return {
        "layout": asdict(layout) | {"dp": layout.dp, "edp": layout.edp},
        "memory": asdict(plan.memory) | {"total": plan.memory.total, "stage": plan.stage},
        "seconds": plan.time.seconds,
        "seconds_by_part": plan.time.parts,
        "tokens_per_second_and_gpu": plan.time.tokens_per_gpu,
        "model_tflops_per_gpu": plan.time.flops_per_gpu / 1e12,
        "stages": [_stage(model, stage) for stage in range(plan.layout.pp)],
        "messages": [
            asdict(each) | {"wire": asdict(each.wire(listing.cluster.node.gpus))}
            for each in messages_of_stage(model, plan.stage)
        ],
    }


def _stage(model: Model, stage: int) -> dict[str, Any]:
    """The memory of each GPU of a pipeline stage, and what a micro-batch keeps by part."""
    memory, parts = memory_of_stage(model, stage), model.parts
    kept = {"experts" if moe else "dense": each.kept for moe, each in parts.layers.items()}
    kept |= {"embedding": parts.embedding.kept, "head": parts.head.kept}
    return asdict(memory) | {"kept_by_a_layer_or_part": kept}
