"""The page: one file with the style, the program and the data inside.

The browser is told to load nothing and to run no other script (Content-Security-Policy). The data
are JSON in which no character can end the element that holds them, and the program writes them only
as text, so a run name with tags in it is shown and not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import moe_parallel

#: The parts of the program, in the order in which they are joined.
SCRIPTS = (
    "elements.js",
    "formats.js",
    "chart.js",
    "heat_map.js",
    "table.js",
    "runs.js",
    "curves.js",
    "experts.js",
    "texts.js",
    "plans.js",
    "start.js",
)


def page_of(content: dict[str, Any], title: str) -> str:
    """The HTML of a report. `content`: JSON, see `report.report_of`."""
    script = '"use strict";\n' + "\n".join(_part(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    made = {
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": moe_parallel.__version__,
    }
    values = {
        "POLICY": policy,
        "TITLE": escaped(title),
        "STYLE": _part("page.css"),
        "DATA": json_in_html({"title": title, "made": made, **content}),
        "SCRIPT": script,
    }
    page = _part("page.html")
    pieces = []
    for number, piece in enumerate(page.split("@@")):
        pieces.append(values[piece] if number % 2 else piece)
    return "".join(pieces)


def escaped(text: str) -> str:
    """Text inside an element or an attribute of HTML. What UTF-8 does not have becomes "?"."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    for character, entity in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(character, f"&{entity};")
    return text


def json_in_html(content: Any) -> str:
    """Compact JSON without <, > and &, so that nothing in it can end or open an element.

    Lone surrogates, which UTF-8 does not have, stay escaped as JSON has them.
    """
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _part(name: str) -> str:
    folder = resources.files("moe_parallel.analysis.report") / "page"
    return (folder / name).read_text(encoding="utf-8")
