"""The archive for a machine with a GPU and no network, and the report that is made there: each
step until a kernel would start."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
REPORT = ROOT / "tools" / "gpu" / "report.sh"
STAND_IN = ROOT / "tests" / "tools" / "gpu_stand_in.py"
BARE = ROOT / "tests" / "tools" / "gpu_host"  # hides packages
# Without a network but with a loopback device, over which the ranks of a run connect.
OFFLINE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
CALLS = ["tests", "operators", "models", "systems"]
LONGEST_CALL = 540  # seconds

EXPECTED = {
    "tests": {
        "grouped-gemm": "passed",
        "no-waiting": "passed",
        "train-topk": "needs CUDA",
        "train-aoe": "needs CUDA",
        "others": "passed",
    },
    "operators": {
        "bench": "torch sees no CUDA GPU here",
    },
    "models": {
        "training": "--cuda-graph-impl full_iteration needs a GPU",
        "whole-models": "torch sees no CUDA GPU here",
        "memcheck": "passed",
        "racecheck": "passed",
        "synccheck": "passed",
    },
    "systems": {"systems": "torch sees no CUDA GPU here"},
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


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("gpu", "torch sees no GPU here"),
        ("megatron.core", "has no megatron.core: name another with PYTHON=, or carry"),
        ("torch", "has no torch"),
        ("cutlass", "no CUTLASS headers to build with"),
        ("fitting,cutlass", "no CUTLASS headers to build with"),  # built for another torch
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


@pytest.fixture(scope="module")
def offline() -> list[str]:
    """The beginning of a command without a network, if the kernel permits it."""
    try:
        subprocess.run([*OFFLINE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return OFFLINE


@pytest.mark.full  # collects all tests
@pytest.mark.parametrize("call", CALLS)
def test_every_step_up_to_its_first_kernel(
    python: Path, offline: list[str], tmp_path: Path, call: str
) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    sanitizer.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    folder = tmp_path / "seen"
    given = {"PYTHON": python, "PYTHONPATH": BARE, "PATH": path, "MINUTES": 60}
    done = run(*offline, REPORT, call, folder, **given)
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
    exact = re.findall(r"^([\w-]+)==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)
    for version in (version for name, version in exact if name == "megatron-core"):
        wheel(folder, "megatron_core", version, ["megatron/core/__init__.py"])
    headers = ["cutlass_library/source/include/cutlass/cutlass.h", "cutlass_library/source/big.cu"]
    files = ["cutlass_library/__init__.py", *headers]
    wheel(folder, "nvidia_cutlass", dict(exact)["nvidia-cutlass"], files)
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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with an extension for torch 2.11.0+cu130, and one file of each kind."""
    root = tmp_path / "tree"
    for name in ("tools/gpu/pack.sh", "tools/find_python.sh", "tools/constraints.txt", "setup.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "csrc").mkdir()
    (root / "moe_parallel").mkdir()
    (root / "moe_parallel" / "__init__.py").touch()
    extension = root / "moe_parallel" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    extension.write_bytes(b"\x7fELF\0torch\x002.11.0+cu130\0")
    later = max(path.stat().st_mtime for path in root.rglob("*")) + 1
    os.utime(extension, (later, later))
    return root


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "said", "is_carried"),
    [
        ({"TORCH": "2.11.0+cu130"}, "", True),
        ({"TORCH": "2.13.0+cu130"}, "was not built for torch 2.13.0+cu130: build it", None),
        ({"TORCH": ""}, "pack: the extension stays here", False),
    ],
)
def test_only_an_extension_for_that_torch_is_carried(
    tree: Path, wheels: dict[str, str], given: dict[str, str], said: str, is_carried: bool | None
) -> None:
    pack = tree / "build" / "gpu-pack.tar.gz"
    done = run(tree / "tools" / "gpu" / "pack.sh", PYTHON=sys.executable, **wheels, **given)
    assert (done.returncode, done.stderr) == (2 if is_carried is None else 0, "")
    assert said in done.stdout
    assert pack.exists() == (is_carried is not None)
    if is_carried is not None:
        with tarfile.open(pack) as archive:
            carried = [name for name in archive.getnames() if name.endswith(".so")]
        assert len(carried) == is_carried
