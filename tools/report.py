"""Write one HTML page about runs: side by side, with curves, experts, warnings and commands.

    python tools/report.py RUN ... [--output FILE] [--title TEXT]

RUN is the folder of a run (--save of the training), a study (all its runs), or a scaling study
after `scaling.py report`. What tools/analyze.py has found on a text is read from the run's folder.
The page of one folder is written into that folder, that of several into the current one. It needs
no network. docs/report.md describes it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from moe_parallel.analysis.report.report import report_of
from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, progress


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("sources", metavar="RUN", nargs="+", type=Path, help="what the page is about")
    tool.add_argument(
        "--output", metavar="FILE", type=Path,
        help="HTML file to write (default: report.html, in RUN if it is the only one)",
    )  # fmt: skip
    tool.add_argument("--title", metavar="TEXT", help="heading (default: the names of the runs)")
    return tool.run(arguments, lambda own: _write(own, arguments))


def _write(own: Namespace, arguments: list[str]) -> None:
    folder = own.sources[0] if len(own.sources) == 1 else Path()
    output = own.output or folder / "report.html"
    if output.is_dir():
        raise InputError(f"--output {output} is a folder: name a file")
    with progress("runs", None, unit=" runs") as advance:
        page = report_of(
            own.sources,
            title=own.title,
            command=["python", "tools/report.py", *arguments],
            advance=advance,
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    print(f"{output} ({output.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
