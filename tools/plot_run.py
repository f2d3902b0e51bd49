"""Draw the picture of a run from its metrics.jsonl, while it trains or afterwards.

python tools/plot_run.py runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

from moe_parallel.analysis.run_figure import FIGURE_NAME, plot_run
from moe_parallel.config.one_line_parser import OneLineParser
from moe_parallel.errors import InputError


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_directory", type=Path, help="the folder that --save named")
    parser.add_argument(
        "--output", type=Path, help=f"PNG file to write (default: RUN_DIRECTORY/{FIGURE_NAME})"
    )
    try:
        options = parser.parse_args(arguments)
        print(plot_run(options.run_directory, options.output))
    except InputError as error:
        print(f"plot_run.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
