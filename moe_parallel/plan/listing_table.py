"""A listing of plans as a table."""

from __future__ import annotations

from collections.abc import Iterator

from moe_parallel.plan.layout import Layout
from moe_parallel.plan.listing import Listing
from moe_parallel.plan.mean_choices import mean_choices_line
from moe_parallel.plan.search import Plan, Refused, reasons

GIB = 2**30

TABLE_HEADER = (
    "   tp cp pp vpp  ep etp   dp  mb recompute  tokens/s/GPU  TFLOP/s  step s    GiB"
    "  weights grads  optim   kept"
)
TABLE_HEADER_BESIDE = "   beside: tokens/s/GPU    GiB"


def listing_table(listing: Listing) -> str:
    """The table, with what it is of above it and the refused layouts below it."""
    return mean_choices_line(listing.config, listing.mean_choices) + "".join(
        f"{line}\n" for line in _lines(listing)
    )


def _lines(listing: Listing) -> Iterator[str]:
    training, plans = listing.config.training, listing.plans
    yield (
        f"{listing.cluster.text}; {training.global_batch_size} sequences of "
        f"{training.seq_length} tokens a step\n"
    )
    if plans:
        yield TABLE_HEADER + ("" if listing.beside[0] is None else TABLE_HEADER_BESIDE)
    for plan, other in zip(plans, listing.beside, strict=True):
        yield _row(plan) + _beside(plan, other)
    if plans:
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


def _beside(plan: Plan, other: Plan | Refused | None) -> str:
    if other is None:
        return ""
    if isinstance(other, Refused):
        return f"   {other.reason}"
    speed = other.time.tokens_per_gpu
    share = plan.time.tokens_per_gpu / speed - 1
    return f"   {speed:12,.0f} ({share:+.1%}){other.memory.total / GIB:7.1f}"


def _shares(plan: Plan) -> str:
    parts = sorted(plan.time.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / plan.time.seconds:.1%}" for name, seconds in parts)
