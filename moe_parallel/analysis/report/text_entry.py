"""What tools/analyze.py found on texts, as the page gets it.

Shape suffixes: A texts, G layers with experts, E experts, T tokens that are shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.analysis.report.numbers import as_bytes, short, shorts
from moe_parallel.analysis.routing import VIEW, TableColumns, read_facts, read_table
from moe_parallel.errors import InputError

#: The name of the folder in a run.
ANALYSIS = "analysis"

#: The most values of the co-activation of a run; of more layers, evenly spaced ones are shown.
PAIR_VALUES = 100_000
#: The most values (tokens times layers) of the tokens that are shown, in each of two arrays.
VIEW_VALUES = 60_000
#: Items at each end of the list of the vocabulary (Huang et al. 2024, Table 4).
MOST_ITEMS = 100
#: The expected number of rare items among those with extreme means is bounded by this.
AT_LEAST = 20


def text_entry(folder: Path) -> dict[str, Any]:
    """The entry of an analysis folder. Raises InputError if it cannot be read."""
    facts = read_facts(folder)
    try:
        return _entry(folder, facts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"{folder}: its files do not fit together ({type(error).__name__}: {error}): repeat "
            "the analysis (tools/analyze.py)"
        ) from error


def _entry(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    loads, layers = read_table(folder, "loads"), read_table(folder, "layers")
    texts, numbers, experts = list(facts["tokens"]), facts["layers"], facts["experts"]
    shape = (len(texts), len(numbers), experts)
    load_AGE = np.array(loads["share"]).reshape(shape) * experts

    def by_text(name: str) -> list[Any]:
        return shorts(np.array(layers[name], dtype=np.float64).reshape(shape[:2]))

    dropped_AG = np.array(layers["dropped"], dtype=np.float64).reshape(shape[:2])
    choices_AG = np.array(loads["tokens"]).reshape(shape).sum(axis=2)
    return {
        "folder": str(folder),
        "command": facts.get("command"),
        "checkpoint": facts.get("checkpoint"),
        "merged": facts.get("merged"),
        "texts": [{"name": name, "tokens": tokens} for name, tokens in facts["tokens"].items()],
        "layers": numbers,
        "experts": experts,
        "load": as_bytes(load_AGE, min(float(experts), max(4.0, float(load_AGE.max())))),
        "experts_per_token": by_text("experts_per_token"),
        "ent_load": by_text("ent_load"),
        "ent_conf": by_text("ent_conf"),
        "dropped": shorts(dropped_AG / np.maximum(choices_AG, 1)),
        "tests": _tests(read_table(folder, "specialization")),
        "block": facts.get("sequences_of_a_block"),
        "permutations": facts.get("permutations"),
        "pairs": _pairs(read_table(folder, "pairs"), numbers, experts),
        "vocabulary": _vocabulary(read_table(folder, "vocabulary")),
        "view": _view(read_table(folder, VIEW), texts),
    }


def _tests(table: TableColumns) -> list[dict[str, Any]]:
    names = list(table)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*table.values(), strict=True)]
    return [row | {name: short(row[name]) for name in names if name != "layer"} for row in rows]


def _pairs(table: TableColumns, layers: list[int], experts: int) -> dict[str, Any]:
    """The share of expert i's tokens that also use expert j: P(j | i), by layer."""
    counts_GEE = np.zeros((len(layers), experts, experts))
    places = np.searchsorted(layers, table["layer"])
    counts_GEE[places, table["expert"], table["other"]] = table["tokens"]
    counts_GEE[places, table["other"], table["expert"]] = table["tokens"]
    own_GE1 = np.einsum("gee->ge", counts_GEE)[:, :, None]
    share_GEE = counts_GEE / np.where(own_GE1 > 0, own_GE1, 1)
    share_GEE[np.broadcast_to(own_GE1 == 0, share_GEE.shape)] = np.nan
    most = max(1, PAIR_VALUES // experts**2)
    shown = np.unique(np.linspace(0, len(layers) - 1, min(most, len(layers))).round().astype(int))
    diagonal = np.arange(experts)
    share_GEE[:, diagonal, diagonal] = np.nan
    found = share_GEE[shown]
    top = float(np.nanmax(found)) if np.isfinite(found).any() else 1.0
    return as_bytes(found, top or 1.0) | {"layers": [layers[place] for place in shown]}


def _vocabulary(table: TableColumns) -> dict[str, Any]:
    """The items with the most and the fewest experts."""
    columns = (table[name] for name in ("text", "occurrences", "experts_per_token"))
    rows = [
        {"piece": text, "times": times, "experts": short(experts)}
        for text, times, experts in zip(*columns, strict=True)
        if times >= AT_LEAST
    ]
    each = min(MOST_ITEMS, len(rows) // 2)
    return {
        "at_least": AT_LEAST,
        "items": len(rows),
        "varies": bool(rows) and rows[0]["experts"] != rows[-1]["experts"],
        "most": rows[:each],
        "fewest": rows[::-1][:each],
    }


def _view(table: TableColumns, texts: list[str]) -> list[dict[str, Any]]:
    """The first tokens of each text: pieces, and by token and layer the best expert (-1: none) and
    the number of experts."""
    found = []
    layers = len(table["best"][0]) if table["best"] else 0
    most = max(1, VIEW_VALUES // max(1, layers * len(texts)))
    for text in texts:
        rows = [row for row, name in enumerate(table["text"]) if name == text][:most]
        if rows:
            used_TG = np.array([table["used"][row] for row in rows], dtype=np.float64)
            best_TG = np.array([table["best"][row] for row in rows], dtype=np.int64)
            found.append(
                {
                    "text": text,
                    "pieces": [table["piece"][row] for row in rows],
                    "samples": [table["sample"][row] for row in rows],
                    "best": best_TG.tolist(),
                    "used": as_bytes(used_TG.clip(0, 254), 254.0),
                    "varies": bool(np.ptp(used_TG)),
                }
            )
    return found
