"""The result of a conversion as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from moe_parallel.convert.conversion import Conversion

COLUMNS = ("layer", "choices", "before", "all K", "first", "probs off", "x W_g off", "condition")


def conversion_table(conversion: Conversion, k: int | None, num_experts: int | None) -> str:
    """The table, as lines for a terminal."""
    lines = []
    if conversion.layers and k and num_experts:
        fitted, held_out = conversion.tokens
        lines += [
            f"fitted to {fitted:,} tokens of training text, measured on {held_out:,} others",
            "".join(f"{column:>11}" for column in COLUMNS),
        ]
        for layer in conversion.layers:
            numbers = (
                layer.after.choices,
                layer.before.choices,
                layer.after.all_choices,
                layer.after.first_choice,
                layer.after.probs,
                layer.gate_error,
            )
            cells = "".join(f"{number:>11.3f}" for number in numbers)
            ranked = f"  {layer.ranking}"
            lines.append(f"{layer.number:>11}{cells}{layer.condition:>11.1f}{ranked}")
        lines += [f"(choices at random: {k / num_experts:.3f})", ""]
    width = max([len(domain) for domain in conversion.losses] + [len("nats/token")])
    lines.append(f"{'nats/token':<{width}}{'source':>11}{'converted':>11}")
    for domain, losses in conversion.losses.items():
        lines.append(f"{domain:<{width}}" + "".join(f"{loss:>11.4f}" for loss in losses))
    return "\n".join(lines)


def conversion_json(conversion: Conversion, **facts: Any) -> str:
    """The complete result and further `facts` about the conversion, as JSON."""
    fitted, held_out = conversion.tokens
    content = facts | {
        "calibration": {"fitted_tokens": fitted, "held_out_tokens": held_out},
        "layers": [asdict(layer) for layer in conversion.layers],
        "loss": {
            domain: {"source": losses[0], "converted": losses[1]}
            for domain, losses in conversion.losses.items()
        },
        "checkpoint": str(conversion.checkpoint),
    }
    return json.dumps(content, indent=1) + "\n"
