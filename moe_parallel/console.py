"""The commands that pip installs: each runs one of the programs, as `python PROGRAM` does.

A wheel has the programs and the examples in moe_parallel/programs, laid out as in the repository
(setup.py puts them there); a checkout has them at its top.
"""

import runpy
import sys
from pathlib import Path

PREFIX = "moe-parallel-"

#: Command without the prefix -> program.
PROGRAMS = {
    "pretrain": "pretrain_gpt_moe.py",
    **{
        tool.replace("_", "-"): f"tools/{tool}.py"
        for tool in (
            "convert",
            "count_parameters",
            "experts_per_vocab_item",
            "generate",
            "order_by_similarity",
            "plot_run",
            "preprocess_data",
            "probe_autonomy",
            "probe_causality",
        )
    },
}


def programs_folder() -> Path:
    """Where pretrain_gpt_moe.py, tools/ and examples/ are."""
    package = Path(__file__).parent
    installed = package / "programs"
    return installed if installed.is_dir() else package.parent


def main() -> None:
    """Runs the program that the command of this process stands for."""
    command = Path(sys.argv[0]).stem.removeprefix(PREFIX)
    runpy.run_path(str(programs_folder() / PROGRAMS[command]), run_name="__main__")


def examples() -> None:
    """Prints the folder of the example configurations."""
    print(programs_folder() / "examples")
