"""The archive for a machine with a GPU and no network, and the report that is made there: each
step until a kernel would start."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tools" / "gpu" / "report.sh"
STAND_IN = ROOT / "tests" / "tools" / "gpu_stand_in.py"
CALLS = ["tests", "operators", "models"]
LONGEST_CALL = 540  # seconds

EXPECTED = {
    "tests": {
        "grouped-gemm": "passed",
        "fused-products": "passed",
        "no-waiting": "passed",
        "train-topk": "needs CUDA",
        "train-aoe": "needs CUDA",
        "others": "passed",
    },
    "operators": {
        "bench": "torch sees no CUDA GPU here",
        "bench-fused": "torch sees no CUDA GPU here",
        "fused-against-unfused": "bench.json",
    },
    "models": {
        "training": "--turns is 0: it must be at least 1",
        "memcheck": "passed",
        "racecheck": "passed",
        "synccheck": "passed",
    },
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The stand-in as a program."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    program.chmod(0o755)
    return program


def run(*command: object, **environment: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **{name: str(text) for name, text in environment.items()}},
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.parametrize("call", ["", "everything"])
def test_a_call_that_is_none(call: str) -> None:
    done = run(REPORT, call)
    assert done.returncode == 2
    assert done.stdout.endswith("is no call: tools/gpu/report.sh tests, operators or models\n")


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("gpu", "torch sees no GPU here"),
        ("megatron.core", "has no megatron.core: name another with PYTHON=, or carry"),
        ("pytest", "has no pytest"),
        ("torch", "has no torch"),
        ("extension,cutlass", "no CUTLASS headers to build with"),
        ("cutlass", "no CUTLASS headers to build with"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    python: Path, tmp_path: Path, lacks: str, said: str
) -> None:
    environment = {"PYTHON": python, "STAND_IN_LACKS": lacks, "CUTLASS_PATH": ""}
    done = run(REPORT, "tests", tmp_path / "seen", **environment)
    assert (done.returncode, done.stderr) == (2, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("report: ") and said in line


@pytest.mark.parametrize("call", CALLS)
def test_the_steps_of_a_call_fit_into_it(call: str) -> None:
    functions = dict(re.findall(r"^(\w+)\(\) {\n(.*?)^}", REPORT.read_text(), re.M | re.S))
    steps = re.sub(r"^    train \w+$", functions["train"], functions[call], flags=re.M)
    loop = r"for \w+ in ([^\n]+); do\n(.*?)done"
    steps = re.sub(loop, lambda match: match[2] * len(match[1].split()), steps, flags=re.S)
    limits = [int(limit) for limit in re.findall(r"(?:step|gpu_tests) \S+ (\d+) ", steps)]
    assert len(limits) == len(EXPECTED[call])
    assert sum(limits) < LONGEST_CALL


@pytest.mark.full  # collects all tests
@pytest.mark.parametrize("call", CALLS)
def test_every_step_up_to_its_first_kernel(python: Path, tmp_path: Path, call: str) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    sanitizer.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    folder = tmp_path / "seen"
    done = run(REPORT, call, folder, PYTHON=python, PATH=path, MINUTES=60)
    steps = dict(re.findall(r"^\| (\S+) \| (.+ \|) `", done.stdout, re.MULTILINE))
    assert steps.keys() == EXPECTED[call].keys(), done.stdout + done.stderr
    for name, result in EXPECTED[call].items():
        assert result in steps[name]
    assert done.returncode == (1 if "failed" in done.stdout else 0)
    with tarfile.open(f"{folder}.tar.gz") as archive:
        names = set(archive.getnames())
    assert {f"seen/{call}.md", *(f"seen/{name}.log" for name in steps)} <= names


def wheel(folder: Path, name: str, version: str, files: list[str]) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file in files:
            archive.writestr(file, "")
        archive.writestr(f"{info}/METADATA", f"Name: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, str]:
    """A folder with wheels that replaces the package registry."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    pinned = dict(re.findall(r'"([\w-]+)==([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    for version in ("0.16.1", "0.19.2"):
        wheel(folder, "megatron_core", version, ["megatron/core/__init__.py"])
    headers = ["cutlass_library/source/include/cutlass/cutlass.h", "cutlass_library/source/big.cu"]
    files = ["cutlass_library/__init__.py", *headers]
    wheel(folder, "nvidia_cutlass", pinned["nvidia-cutlass"], files)
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


def test_what_is_carried(tmp_path: Path, wheels: dict[str, str]) -> None:
    file = tmp_path / "pack.tar.gz"
    done = run(ROOT / "tools" / "gpu" / "pack.sh", file, PYTHON=sys.executable, **wheels)
    assert (done.returncode, done.stderr) == (0, "")
    with tarfile.open(file) as archive:
        names = {name.removeprefix("./") for name in archive.getnames()}
    assert {
        "tools/gpu/report.sh",
        "csrc/cuda/grouped_gemm.cpp",
        "tests/ops/test_grouped_gemm.py",
        ".carried/commit",
        ".carried/megatron/core/__init__.py",
        ".carried/cutlass_library/__init__.py",
        ".carried/cutlass_library/source/include/cutlass/cutlass.h",
    } <= names
    assert ".carried/cutlass_library/source/big.cu" not in names


def test_a_wheel_that_is_nowhere(tmp_path: Path, wheels: dict[str, str]) -> None:
    nowhere = wheels | {"PIP_FIND_LINKS": str(tmp_path)}
    script = ROOT / "tools" / "gpu" / "pack.sh"
    done = run(script, tmp_path / "pack.tar.gz", PYTHON=sys.executable, **nowhere)
    assert done.returncode == 2
    assert done.stdout.startswith("pack: no wheel of megatron-core==")
    assert not (tmp_path / "pack.tar.gz").exists()
