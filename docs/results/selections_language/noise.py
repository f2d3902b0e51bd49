"""The tables of the pilot runs and of the power, from noise.csv beside this file.

python docs/results/selections_language/noise.py
"""

import csv
import math
import statistics
from pathlib import Path

from scipy import stats

HERE = Path(__file__).parent
MARGIN, LEVEL, POWER = 0.01, 0.05, 0.9


def seeds_for_equivalence(deviation: float) -> int:
    """The fewest pairs whose two one-sided tests show equivalence with POWER if the true difference
    is 0 (Phillips 1990, with the noncentral t distribution)."""
    for pairs in range(3, 10_000):
        shift = MARGIN * math.sqrt(pairs) / deviation
        critical = stats.t.isf(LEVEL, pairs - 1)
        if 2 * stats.nct.sf(critical, pairs - 1, shift) - 1 >= POWER:
            return pairs
    raise ValueError(deviation)


def least_difference(deviation: float, pairs: int, contenders: int) -> float:
    """The difference that the two-sided t test finds with POWER, at the strictest level of Holm."""
    critical = stats.t.isf(LEVEL / contenders / 2, pairs - 1)
    shift = critical
    while stats.nct.sf(critical, pairs - 1, shift) < POWER:
        shift += 0.01
    return shift * deviation / math.sqrt(pairs)


def main() -> None:
    runs: dict[str, dict[int, float]] = {}
    with (HERE / "noise.csv").open() as file:
        for row in csv.DictReader(file):
            loss = (float(row["code"]) + float(row["prose"])) / 2
            runs.setdefault(row["pilot"], {})[int(row["seed"])] = loss
    for pilot, losses in runs.items():
        values = list(losses.values())
        spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
        print(f"{pilot}: {len(values)} runs, mean {statistics.fmean(values):.4f}, sd {spread}")
    aoe, topk = runs["aoe, bytes, std 0.1"], runs["bytes, std 0.1"]
    pairs = [aoe[seed] - topk[seed] for seed in sorted(aoe.keys() & topk.keys())]
    told = ", ".join(f"{pair:+.4f}" for pair in pairs)
    print(f"aoe minus topk: {told}; sd {statistics.stdev(pairs):.4f}")
    for deviation in (0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.08):
        pairs = seeds_for_equivalence(deviation)
        least = [f"{least_difference(deviation, n, 10):.4f}" for n in (10, 15, 20)]
        print(
            f"sd {deviation}: {pairs} seeds; least difference with 10, 15, 20: {', '.join(least)}"
        )


if __name__ == "__main__":
    main()
