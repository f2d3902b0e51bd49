"""Draw the figure of a run from its metrics.jsonl, during training or afterward.

python tools/plot_run.py runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

from moe_parallel.analysis.run_figure import FIGURE_NAME, plot_run
from moe_parallel.tool import Tool


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__.splitlines()[0])
    tool.add_argument("run_directory", type=Path, help="run folder (--save of the training)")
    tool.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"PNG file to write (default: RUN_DIRECTORY/{FIGURE_NAME})",
    )
    return tool.run(arguments, lambda own: print(plot_run(own.run_directory, own.output)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
