"""An operator's files begin with its name, its stem, in every folder; shared files are listed here.

The tests read only the source; they build nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC, NATIVE, TESTS = (
    ROOT / "csrc",
    ROOT / "moe_parallel" / "ops" / "native",
    ROOT / "tests" / "ops",
)

# Operators that are the gradient of another one, in the other one's files.
STEM_OF = {
    "grouped_outer": "grouped_gemm",
    "grouped_outer_add": "grouped_gemm",
    "pack_rows": "packed_rows",
    "pack_rows_backward": "packed_rows",
    "visits": "packed_rows",
    "split_and_rotate": "rotary",
    "split_and_rotate_backward": "rotary",
}

# Folder -> files that begin with no operator's name, and folders, each of which is one unit.
SHARED = {
    CSRC: {
        "alignment",
        "bindings",
        "block_product",  # for attention, and sums in fp32 by oneDNN
        "expert_rows",  # for routed_experts and autonomous_experts
        "launch",
        "onednn",  # products in fp32 by another library
        "scalar_type",
        "scratch_rows",
    },
    CSRC / "cpu": {
        "avx2",
        "avx512",
        "cache_lines",
        "capability",
        "large_output",
        "parts",
        "portable",
        "processor",
    },
    CSRC / "cpu" / "kernels": {"block_product", "table", "vectors"},
    CSRC / "cuda": {"cutlass", "hopper_ptx", "launch", "reduce", "scalar", "vector"},
    NATIVE: {"fake", "main_gradients"},
}
ROOMS_INSIDE = {"cpu", "cuda", "kernels"}


def _begins_with(name: str, stem: str) -> bool:
    return name == stem or name.startswith(f"{stem}_")


def _stem(name: str, stems: set[str]) -> str | None:
    """The longest of the stems with which the name begins."""
    return max((s for s in stems if _begins_with(name, s)), key=len, default=None)


REGISTERED = re.compile(r'^MOE_PARALLEL_(?:CPU_)?OPERATOR\(\s*"(\w+)"', re.MULTILINE)


def _operators() -> dict[str, str]:
    """Operator -> the name of the file that registers it."""
    return {
        name: path.stem
        for path in sorted(CSRC.glob("*.cpp"))
        for name in REGISTERED.findall(path.read_text())
    }


OPERATORS = _operators()
STEMS = set(OPERATORS.values())


def _names(room: Path) -> Iterator[str]:
    for path in sorted(room.iterdir()):
        if path.name not in ROOMS_INSIDE | {"__init__.py", "__pycache__"}:
            yield path.stem


def _defined(room: Path, device: str) -> Iterator[tuple[str, str]]:
    """(name of a file, task) of every run_on_cpu() or run_on_cuda() that the folder defines."""
    for path in sorted([*room.glob("*.cpp"), *room.glob("*.cu")]):
        for task in re.findall(rf"^void run_on_{device}\(const (\w+)&", path.read_text(), re.M):
            yield path.stem, task


def test_an_operator_is_registered_in_its_file():
    assert len(OPERATORS) > 10
    wrong = {
        name: s for name, s in OPERATORS.items() if not _begins_with(STEM_OF.get(name, name), s)
    }
    assert not wrong, f"operators in a file of another name: {wrong}"


@pytest.mark.parametrize("stem", sorted(STEMS))
def test_it_has_a_module_and_tests(stem):
    assert (NATIVE / f"{stem}.py").exists()
    tests = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    assert re.search(rf"\b{stem}\b", tests), f"no test in {TESTS} names {stem}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_kernels_are_in_its_files(device):
    """A task is declared and run in files with the same stem."""
    declared = {
        task: _stem(header.stem, STEMS | SHARED[CSRC])
        for header in CSRC.glob("*.h")
        for task in re.findall(r"^struct (\w+) {", header.read_text(), re.M)
    }
    found = list(_defined(CSRC / device, device))
    assert len(found) > 8
    wrong = [(name, task) for name, task in found if _stem(name, STEMS) != declared[task]]
    assert not wrong, f"run_on_{device}() in a file of another stem than the task's: {wrong}"


@pytest.mark.parametrize("room", SHARED, ids=lambda room: str(room.relative_to(ROOT)))
def test_every_file_has_a_stem(room):
    stems = STEMS | SHARED[room]
    homeless = [name for name in _names(room) if _stem(name, stems) is None]
    assert not homeless, f"begin with no operator's name, nor are they in SHARED: {homeless}"
    unused = SHARED[room] - {_stem(name, stems) for name in _names(room)}
    assert not unused, f"no longer there, so take them out of SHARED: {unused}"


def test_a_stem_is_whole_words():
    assert _stem("norm_topk_gradient", STEMS) == "norm_topk"
    assert _stem("swiglu_tensors", STEMS) == "swiglu"
    assert _stem("score_tokens", STEMS) is None
    assert _stem("permuted", STEMS) is None
