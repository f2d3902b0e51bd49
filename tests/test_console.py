"""The commands that pip installs: each is declared, has a program, and is in the wheel."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from moe_parallel.console import COMMAND_PREFIX, PROGRAMS
from tests.tiers import rest_in_full

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def command(folder: Path, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `folder` from another directory, with the installed package."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [folder / (COMMAND_PREFIX + name), *map(str, arguments)],
        cwd=folder,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_every_program_has_its_command() -> None:
    declared = {name.removeprefix(COMMAND_PREFIX) for name in SCRIPTS}
    assert all(name.startswith(COMMAND_PREFIX) for name in SCRIPTS)
    assert declared == {*PROGRAMS, "examples"}
    tools = {f"tools/{path.name}" for path in ROOT.glob("tools/*.py")}
    assert {*PROGRAMS.values()} == {"pretrain_gpt_moe.py", *tools}
    for target in SCRIPTS.values():
        module, function = target.split(":")
        assert callable(getattr(import_module(module), function))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the commands as pip would write them, for this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    for name, target in SCRIPTS.items():
        module, function = target.split(":")
        path = folder / name
        path.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from {module} import {function}\n"
            f'if __name__ == "__main__":\n    sys.exit({function}())\n'
        )
        path.chmod(0o755)
    return folder


@pytest.mark.parametrize("name", rest_in_full(PROGRAMS, "pretrain", "generate", "plan"))
def test_commands_help(commands: Path, name: str) -> None:
    done = command(commands, name, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_wrong_input_is_one_line_and_exit_code_2(commands: Path) -> None:
    done = command(commands, "count-parameters", "--num-layers", "none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_examples_are_where_the_command_says(commands: Path) -> None:
    folder = Path(command(commands, "examples").stdout.strip())
    assert (folder / "quickstart.yaml").is_file()


@pytest.mark.full
def test_an_installed_wheel(tmp_path: Path) -> None:
    """The wheel is built, installed next to this environment's packages, and run elsewhere."""
    source, wheels, venv = (tmp_path / name for name in ("source", "wheels", "venv"))
    left_behind = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_behind)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run(
        build, check=True, env={**os.environ, "MOE_PARALLEL_BUILD": "cpu"}, capture_output=True
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (wheel,) = wheels.glob("moe_parallel-*.whl")
    install = ["install", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, "--python", venv, *install], check=True, capture_output=True)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join(packages))

    folder = venv / "bin"
    examples = Path(command(folder, "examples").stdout.strip())
    assert examples.is_relative_to(site) and (examples / "quickstart.yaml").is_file()
    assert command(folder, "count-parameters", "--help").returncode == 0
    small = {
        "num-layers": 1, "hidden-size": 16, "num-attention-heads": 1, "ffn-hidden-size": 16,
        "num-experts": 2, "expert-selection": "aoe", "aoe-low-rank-size": 4, "vocab-size": 300,
        "seq-length": 16, "micro-batch-size": 1, "global-batch-size": 2, "train-iters": 2,
        "eval-iters": 1, "lr-warmup-iters": 0, "full-evaluation": "false",
    }  # fmt: skip
    flags = [word for name, value in small.items() for word in (f"--{name}", value)]
    run = tmp_path / "run"
    trained = command(folder, "pretrain", "--nproc-per-node", 2, *flags, "--save", run)
    assert trained.returncode == 0, trained.stderr
    written = command(folder, "generate", "--load", run, "--prompt", "def", "--tokens", 3)
    assert written.returncode == 0 and "def" in written.stdout, written.stderr
