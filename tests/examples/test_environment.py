"""environment.sh takes the Python of the checkout, and says which."""

import subprocess
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).parents[2] / "examples" / "slurm" / "environment.sh"


@pytest.mark.parametrize(
    ("environments", "named", "taken"),
    [
        ([".venv", ".venv-3.12"], "", ".venv/bin/python"),
        ([".venv-3.12"], "", ".venv-3.12/bin/python"),
        ([".venv"], "python3", "python3"),
        ([], "", None),
    ],
)
def test_the_python_of_a_job(tmp_path, environments, named, taken):
    for each in environments:
        python = tmp_path / each / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch(0o755)
    done = subprocess.run(
        ["bash", "-uc", '. "$0"; echo "it runs $PYTHON"', ENVIRONMENT],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": named},
        capture_output=True,
        text=True,
    )
    if taken is None:
        assert done.returncode == 2 and "run make set-up there" in done.stdout
        assert done.stdout.count("\n") == 1
        return
    path = tmp_path / taken if "/" in taken else taken
    assert done.stdout == f"python: {path}\nit runs {path}\n"
