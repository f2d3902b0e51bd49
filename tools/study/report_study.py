"""Make the tables and pictures of a study again, while it trains or afterwards.

python tools/study/report_study.py studies/first
"""

from __future__ import annotations

import sys
from pathlib import Path

from moe_parallel.analysis.study.folder import StudyFolder
from moe_parallel.analysis.study.report import write_report
from moe_parallel.config.one_line_parser import OneLineParser
from moe_parallel.errors import InputError


def main(arguments: list[str]) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="the folder that --output named")
    try:
        print(write_report(StudyFolder(parser.parse_args(arguments).study)))
    except InputError as error:
        print(f"report_study.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
