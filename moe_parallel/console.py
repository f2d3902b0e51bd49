"""The commands that pip installs. Each runs one of the programs, as `python PROGRAM` does.

In a wheel, the programs and the examples are in moe_parallel/programs, in the same folders as in
the repository (setup.py copies them). In a checkout, they are at the top.
"""

import runpy
import sys
from pathlib import Path

COMMAND_PREFIX = "moe-parallel-"

#: From the command, without its prefix, to the program.
PROGRAMS = {
    "pretrain": "pretrain_gpt_moe.py",
    **{
        tool.replace("_", "-"): f"tools/{tool}.py"
        for tool in (
            "analyze",
            "checkpoint",
            "convert",
            "count_parameters",
            "evaluate",
            "export_hf",
            "generate",
            "import_hf",
            "inspect_data",
            "megatron_checkpoint",
            "order_by_similarity",
            "plan",
            "prepare_data_cache",
            "preprocess_data",
            "probe_autonomy",
            "probe_causality",
            "report",
        )
    },
}


def programs_folder() -> Path:
    """The folder of pretrain_gpt_moe.py, tools/ and examples/."""
    package = Path(__file__).parent
    installed = package / "programs"
    return installed if installed.is_dir() else package.parent


def main() -> None:
    """Runs the program that belongs to the command of this process."""
    command = Path(sys.argv[0]).stem.removeprefix(COMMAND_PREFIX)
    runpy.run_path(str(programs_folder() / PROGRAMS[command]), run_name="__main__")


def examples() -> None:
    """Prints the folder of the example configurations."""
    print(programs_folder() / "examples")
