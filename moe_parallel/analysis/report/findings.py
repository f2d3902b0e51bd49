"""What a reader of a run should know first: a loss that is not finite, dead experts, drops.

A finding has a level: `problem` (the numbers of the run mean little), `warning` (they need care),
or `note`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from moe_parallel.analysis.run_history import RoutingHistory, RunHistory, layer_numbers, relative

PROBLEM, WARNING, NOTE = "problem", "warning", "note"

#: An expert with less than this part of an even share is called dead.
DEAD = 0.01
#: From these on, there is a warning.
MUCH_DROPPED = 0.01
BUSY_EXPERT = 2.0  # times an even share
BUSY_RANK = 1.5  # times the mean of the ranks
RISEN = 0.1  # nats above the best evaluation


@dataclass(frozen=True)
class Finding:
    level: str
    kind: str  # one word or two, for a list
    text: str


def loads_of(history: RunHistory) -> dict[str, tuple[list[int], np.ndarray]]:
    """The loads that are looked at: where they are from, the layers, and [G, E] in multiples of an
    even share. Those on held-out text are of the last evaluation, over all domains."""
    found = {}
    if history.routing is not None:
        end_GE = history.routing.final_relative_load_GE()
        found["at the end of training"] = (history.routing.layers, end_GE)
    if held_out := history.held_out("tokens_per_expert"):
        layers = layer_numbers(history.final[next(iter(held_out))]["layers"])
        found["on held-out text"] = (layers, relative(np.sum(list(held_out.values()), axis=0)))
    return found


def findings_of(history: RunHistory, train_iters: int | None) -> list[Finding]:
    """The findings of a run, the worst first. `train_iters`: of its configuration, if known."""
    found = [
        *_not_finite(history),
        *chain.from_iterable(_loads(where, *load) for where, load in loads_of(history).items()),
        *(_drops(history.routing) if history.routing is not None else ()),
        *_ranks(history),
        *_risen(history),
        *_unfinished(history, train_iters),
    ]
    order = (PROBLEM, WARNING, NOTE)
    return sorted(found, key=lambda finding: order.index(finding.level))


def _not_finite(history: RunHistory) -> Iterator[Finding]:
    for name, label in (("lm_loss", "training loss"), ("grad_norm", "gradient norm")):
        at = [r["iteration"] for r in history.training if name in r and r[name] is None]
        if at:
            times = f" and {len(at) - 1:,} more" if len(at) > 1 else ""
            yield Finding(
                PROBLEM, "NaN", f"The {label} is not finite at iteration {at[0]:,}{times}."
            )
    bad = {
        domain: int(curve.iterations_R[~np.isfinite(curve.values_R)][0])
        for domain, curve in history.validation.items()
        if not np.isfinite(curve.values_R).all()
    }
    for domain, iteration in bad.items():
        yield Finding(
            PROBLEM, "NaN", f"The loss on {domain} is not finite at iteration {iteration:,}."
        )


def _loads(where: str, layers: list[int], load_GE: np.ndarray) -> Iterator[Finding]:
    dead = {
        layer: np.flatnonzero(row_E < DEAD).tolist()
        for layer, row_E in zip(layers, load_GE, strict=True)
        if (row_E < DEAD).any()
    }
    if dead:
        count = sum(map(len, dead.values()))
        yield Finding(
            WARNING,
            "dead experts",
            f"{count} of {load_GE.size:,} experts take less than {DEAD:.0%} of an even share "
            f"{where}: {_places(dead)}.",
        )
    busiest = np.unravel_index(int(np.argmax(load_GE)), load_GE.shape)
    if load_GE[busiest] >= BUSY_EXPERT:
        yield Finding(
            WARNING,
            "imbalance",
            f"Expert {busiest[1]} of layer {layers[int(busiest[0])]} takes "
            f"{load_GE[busiest]:.1f} times an even share {where}.",
        )


def _drops(routing: RoutingHistory) -> Iterator[Finding]:
    dropped = routing.dropped_share()
    if dropped:
        layer = int(np.argmax(routing.tokens_dropped_RG.sum(axis=0)))
        yield Finding(
            WARNING if dropped >= MUCH_DROPPED else NOTE,
            "drops",
            f"{dropped:.2%} of all choices were over capacity and dropped, most of them in layer "
            f"{routing.layers[layer]}.",
        )


def _places(dead: dict[int, list[int]]) -> str:
    shown = [
        f"layer {layer}: {', '.join(map(str, experts[:8]))}{' ...' if len(experts) > 8 else ''}"
        for layer, experts in list(dead.items())[:4]
    ]
    more = len(dead) - len(shown)
    return "; ".join(shown) + (f"; and {more} more layers" if more > 0 else "")


def _ranks(history: RunHistory) -> Iterator[Finding]:
    loads = [r["rank_load"]["overload"] for r in history.end if r.get("rank_load")]
    if loads and max(loads) >= BUSY_RANK:
        yield Finding(
            WARNING,
            "busy rank",
            f"At the end, the experts of one rank take up to {max(loads):.1f} times the choices of "
            "the mean rank.",
        )
    slow = [
        r["ranks"]["slowest"]
        for r in history.training
        if (r.get("ranks") or {}).get("slowest", None) is not None
        and r["ranks"]["slowest"]["cause"] == "host"
    ]
    if slow:
        part = len(slow) / len(history.training)
        yield Finding(
            NOTE,
            "slow rank",
            f"Rank {slow[-1]['rank']} on {slow[-1]['host']} was clearly slower than the others, "
            f"in the last of {len(slow):,} such log lines ({part:.0%} of all).",
        )


def _risen(history: RunHistory) -> Iterator[Finding]:
    for domain, curve in history.validation.items():
        last = float(curve.values_R[-1])
        finite = curve.values_R[np.isfinite(curve.values_R)]
        if math.isfinite(last) and last > finite.min() + RISEN:
            best = int(curve.iterations_R[np.nanargmin(curve.values_R)])
            yield Finding(
                NOTE,
                "loss has risen",
                f"The loss on {domain} ends at {last:.3f}, {last - finite.min():.3f} above its "
                f"best at iteration {best:,}.",
            )


def _unfinished(history: RunHistory, train_iters: int | None) -> Iterator[Finding]:
    if train_iters is not None and history.last_iteration < train_iters:
        yield Finding(
            NOTE,
            "unfinished",
            f"The metrics end at iteration {history.last_iteration:,} of {train_iters:,}.",
        )
