"""What a reader of a run should know first: a loss that is not finite, dead experts, drops.

A finding has a level: `problem` (the numbers of the run mean little), `warning` (they need care),
or `note`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    found = [*_losses(history)]
    for where, load in loads_of(history).items():
        found += _loads(where, *load)
    if history.routing is not None:
        found += _drops(history.routing)
    found += _ranks(history)
    if train_iters is not None and history.last_iteration < train_iters:
        text = f"The metrics end at iteration {history.last_iteration:,} of {train_iters:,}."
        found.append(Finding(NOTE, "unfinished", text))
    return sorted(found, key=lambda finding: (PROBLEM, WARNING, NOTE).index(finding.level))


def _losses(history: RunHistory) -> Iterator[Finding]:
    for name, label in (("lm_loss", "training loss"), ("grad_norm", "gradient norm")):
        at = [r["iteration"] for r in history.training if name in r and r[name] is None]
        if at:
            more = f" and {len(at) - 1:,} more" if len(at) > 1 else ""
            text = f"The {label} is not finite at iteration {at[0]:,}{more}."
            yield Finding(PROBLEM, "NaN", text)
    for domain, curve in history.validation.items():
        values_R, finite = curve.values_R, np.isfinite(curve.values_R)
        if not finite.all():
            text = f"iteration {int(curve.iterations_R[~finite][0]):,}"
            yield Finding(PROBLEM, "NaN", f"The loss on {domain} is not finite at {text}.")
        if finite[-1] and (above := values_R[-1] - values_R[finite].min()) > RISEN:
            best = int(curve.iterations_R[np.nanargmin(values_R)])
            yield Finding(
                NOTE,
                "loss has risen",
                f"The loss on {domain} ends at {values_R[-1]:.3f}, {above:.3f} above its "
                f"best at iteration {best:,}.",
            )


def _loads(where: str, layers: list[int], load_GE: np.ndarray) -> Iterator[Finding]:
    if (dead_GE := load_GE < DEAD).any():
        named = []
        for place in np.flatnonzero(dead_GE.any(axis=1)):
            experts = np.flatnonzero(dead_GE[place])
            more = " ..." if len(experts) > 8 else ""
            named.append(f"layer {layers[place]}: {', '.join(map(str, experts[:8]))}{more}")
        others = f"; and {len(named) - 4} more layers" if len(named) > 4 else ""
        yield Finding(
            WARNING,
            "dead experts",
            f"{dead_GE.sum()} of {load_GE.size:,} experts take less than {DEAD:.0%} of an even "
            f"share {where}: {'; '.join(named[:4])}{others}.",
        )
    layer, expert = np.unravel_index(int(np.argmax(load_GE)), load_GE.shape)
    if load_GE[layer, expert] >= BUSY_EXPERT:
        yield Finding(
            WARNING,
            "imbalance",
            f"Expert {expert} of layer {layers[int(layer)]} takes "
            f"{load_GE[layer, expert]:.1f} times an even share {where}.",
        )


def _drops(routing: RoutingHistory) -> Iterator[Finding]:
    if dropped := routing.dropped_share():
        layer = int(np.argmax(routing.tokens_dropped_RG.sum(axis=0)))
        yield Finding(
            WARNING if dropped >= MUCH_DROPPED else NOTE,
            "drops",
            f"{dropped:.2%} of all choices were over capacity and dropped, most of them in layer "
            f"{routing.layers[layer]}.",
        )


def _ranks(history: RunHistory) -> Iterator[Finding]:
    busiest = max(
        (r["rank_load"]["overload"] for r in history.end if r.get("rank_load")), default=0
    )
    if busiest >= BUSY_RANK:
        yield Finding(
            WARNING,
            "busy rank",
            f"At the end, the experts of one rank take up to {busiest:.1f} times the choices of "
            "the mean rank.",
        )
    slowest = [(record.get("ranks") or {}).get("slowest") for record in history.training]
    slow = [each for each in slowest if each is not None and each["cause"] == "host"]
    if slow:
        yield Finding(
            NOTE,
            "slow rank",
            f"Rank {slow[-1]['rank']} on {slow[-1]['host']} was clearly slower than the others, "
            f"in the last of {len(slow):,} such log lines ({len(slow) / len(slowest):.0%} of all).",
        )
