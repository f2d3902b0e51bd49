"""A listing of plans as an object for JSON, with the memory and the messages of every stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moe_parallel.plan.cluster import Cluster
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.listing import Listing
from moe_parallel.plan.mean_choices import mean_choices_source
from moe_parallel.plan.memory import activations_by_part, memory_of_stage, weights_by_part
from moe_parallel.plan.messages import messages_of_stage
from moe_parallel.plan.search import Plan, Refused
from moe_parallel.plan.shape import Shape, shape_of, vocabulary_of


def listing_json(listing: Listing) -> dict[str, Any]:
    config, cluster = listing.config, listing.cluster
    shape = shape_of(config, vocabulary_of(config), listing.mean_choices)
    return {
        "cluster": asdict(cluster) | {"gpus": cluster.ranks},
        "plans": [
            _plan(shape, cluster, plan) | ({} if other is None else {"beside": _beside(other)})
            for plan, other in zip(listing.plans, listing.beside, strict=True)
        ],
        "refused": [asdict(each) for each in listing.refused],
        "experts_per_token": _experts_per_token(shape, listing),
    }


def _experts_per_token(shape: Shape, listing: Listing) -> dict[str, Any] | None:
    """The mean number of experts per token, and what says it. None: there are no experts."""
    if shape.experts is None:
        return None
    source = mean_choices_source(listing.config, listing.mean_choices)
    return {"mean": shape.experts.per_token, "target_of": source}


def _plan(shape: Shape, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    messages = messages_of_stage(shape, plan.layout, plan.stage)
    return _summary(plan) | {
        "stages": [_stage(shape, plan.layout, stage) for stage in range(plan.layout.pp)],
        "messages": [
            asdict(each) | {"wire": asdict(each.wire(cluster.node.gpus))} for each in messages
        ],
    }


def _stage(shape: Shape, layout: Layout, stage: int) -> dict[str, Any]:
    """The memory of each GPU of a pipeline stage."""
    return asdict(memory_of_stage(shape, layout, stage)) | {
        "weights_by_part": weights_by_part(shape, layout, stage),
        "activations_of_a_micro_batch_by_part": activations_by_part(shape, layout, stage),
    }


def _summary(plan: Plan) -> dict[str, Any]:
    return {
        "layout": asdict(plan.layout) | {"dp": plan.layout.dp, "edp": plan.layout.edp},
        "memory": asdict(plan.memory) | {"total": plan.memory.total, "stage": plan.stage},
        "seconds": plan.time.seconds,
        "seconds_by_part": plan.time.parts,
        "tokens_per_second_and_gpu": plan.time.tokens_per_gpu,
        "model_tflops_per_gpu": plan.time.flops_per_gpu / 1e12,
    }


def _beside(other: Plan | Refused) -> dict[str, Any]:
    return asdict(other) if isinstance(other, Refused) else _summary(other)
