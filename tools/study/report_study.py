"""Write the tables and figures of a study again, during training or afterward.

python tools/study/report_study.py studies/first
"""

from __future__ import annotations

import sys
from pathlib import Path

from moe_parallel.analysis.study.folder import StudyFolder
from moe_parallel.analysis.study.report import write_study_report
from moe_parallel.tool import Tool


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__.splitlines()[0])
    tool.add_argument("study", type=Path, help="the folder that --output named")
    return tool.run(arguments, lambda own: print(write_study_report(StudyFolder(own.study))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
