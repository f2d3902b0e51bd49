"""Find the tier and the test that detect each fault.

    python -m tests.mutants.run [--only WORD...] [--near] [--quick] [--jobs N] [OPTION OF PYTEST]...

Works in a copy of the tree, one fault after the other. A fault in C++ first needs a build. Then the
tests nearest to the fault, the quick tier, the nearest tests of the full tier, and the full tier
run until one fails. Prints a table for CONTRIBUTING.md. Most faults are detected within seconds; an
undetected one costs both tiers, unless --near or --quick leaves tests out. All tests must pass
without a fault; `--deselect` omits a test.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.fault import Fault
from tests.mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 3600  # seconds; a fault that makes a test hang is detected too
NOBODY = "-"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="faults with one of these words")
    parser.add_argument("--near", action="store_true", help="the tests nearest to a fault alone")
    parser.add_argument("--quick", action="store_true", help="the quick tier alone")
    parser.add_argument("--jobs", type=int, default=1, help="tests side by side")
    given, options = parser.parse_known_args(arguments)
    chosen = [fault for fault in FAULTS if any(word in _words(fault) for word in given.only)]
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        print("| fault | file | tier | first test that fails |\n|---|---|---|---|", flush=True)
        # Faults in kernels are last, so that each build starts from the previous one.
        for fault in sorted(chosen, key=is_compiled):
            tiers = ("quick",) if given.quick else ("quick", "full")
            planned = [step for step in steps(fault, given.near, given.jobs) if step[0] in tiers]
            tier, test = judge(tree, fault, planned, options)
            seen.append(tier)
            print(f"| {fault.name} | `{fault.file}` | {tier} | {test} |", flush=True)
    print(f"\n{len(seen)} faults: {seen.count('quick')} seen by the quick tier, ", end="")
    print(f"{seen.count('full')} more by the full one, {seen.count(NOBODY)} by none")
    return 0


def _words(fault: Fault) -> str:
    return f"{fault.name} {fault.file}"


def copy_tree(folder: Path) -> Path:
    """The files that git tracks or would track, and the built extension."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("moe_parallel/*.so")]
    for name in [*filter(None, names.split("\0")), *built]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    return folder


def is_compiled(fault: Fault) -> bool:
    """Whether the fault is in the extension for the CPU."""
    return fault.file.startswith("csrc/") and not fault.file.startswith("csrc/cuda/")


def judge(
    tree: Path, fault: Fault, steps: list[tuple[str, list[str]]], options: list[str]
) -> tuple[str, str]:
    """The tier and the test that detect a fault."""
    file = tree / fault.file
    sound = file.read_text()
    assert sound.count(fault.old) == 1, fault
    file.write_text(sound.replace(fault.old, fault.new))
    try:
        if is_compiled(fault):
            build(tree)
        for tier, selection in steps:
            if test := first_failure(tree, [*selection, *options]):
                return tier, test
    finally:
        file.write_text(sound)
    return NOBODY, NOBODY


def steps(fault: Fault, near: bool, jobs: int) -> Iterator[tuple[str, list[str]]]:
    """(tier, arguments of pytest), in the order in which they run."""
    everything = ["-n", str(jobs), "--dist", "worksteal"]
    # The test of the list of faults must not count as a test of a fault.
    everything += ["--ignore", "tests/mutants"]
    yield "quick", list(fault.near)
    if not near:
        yield "quick", everything
    yield "full", ["--full", *fault.near]
    if not near:
        yield "full", ["--full", *everything]


def build(tree: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "MOE_PARALLEL_BUILD": "cpu"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def first_failure(tree: Path, options: list[str]) -> str | None:
    """The test that failed first, or how the tests ended; None: all passed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return "no end within an hour"
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::\w+)?)", done.stdout, re.MULTILINE)
    return f"`{failed[1]}`" if failed else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
