"""No two types, functions or constants of the package have the same name.

The tests read only the source (`ast`); they import nothing.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "moe_parallel"
FILES = sorted(PACKAGE.rglob("*.py"))


def _unit(path: Path) -> str:
    """`ops` for a file of moe_parallel/ops."""
    return path.relative_to(PACKAGE).parts[0]


def _types_of(source: str) -> Iterator[str]:
    """The classes and the public type aliases that the source of a module defines at its top.

    By convention only types have names in CamelCase, so an alias is such a name with a value.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if name[0].isupper() and not name.isupper():
                yield name


@pytest.mark.parametrize(
    ("source", "types"),
    [
        ("class Batch: pass", ["Batch"]),
        ("class _Part(Batch): pass", ["_Part"]),
        ("Batch = dict[str, Tensor]", ["Batch"]),
        ('Item = TypeVar("Item")', ["Item"]),
        ("Batch: TypeAlias = Mapping[str, Tensor]", ["Batch"]),
        ("MOST = 3\nN = 4\n_Batch = int\nwords = Batch\nname: Batch", []),
        ("def f():\n    Batch = int", []),
    ],
)
def test_the_finder_of_types(source: str, types: list[str]) -> None:
    assert list(_types_of(source)) == types


def test_no_two_types_have_the_same_name() -> None:
    """Of the model in `hf`, which imports nothing of ours, some rules repeat those of selection."""
    found: dict[str, list[str]] = {}
    of_package = [path for path in FILES if _unit(path) != "hf"]
    for path in (*of_package, *sorted((ROOT / "tools").rglob("*.py"))):
        for name in _types_of(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    same = {name: files for name, files in found.items() if len(files) > 1}
    assert not same, f"rename all but one: {same}"


def _functions_and_constants_of(source: str) -> Iterator[str]:
    """The public ones that the source of a module defines at its top."""
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        names = [name for name in names if name.isupper()]
        if isinstance(node, ast.FunctionDef):
            names = [node.name]
        yield from (name for name in names if not name.startswith("_"))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def draw(): pass\ndef _draw(): pass", ["draw"]),
        ("MOST = 3\n_LEAST: int = 1\nN: int = 4\nM: int", ["MOST", "N"]),
        ("class Batch: pass\nPart = Batch\n__all__ = []", []),
        ("def f():\n    MOST = 3\n    def g(): pass", ["f"]),
    ],
)
def test_the_finder_of_functions_and_constants(source: str, names: list[str]) -> None:
    assert list(_functions_and_constants_of(source)) == names


# What each system has, so that every module of `systems` may define it.
PARTS_OF_A_SYSTEM = {"rules", "controller", "upcycling"}


def test_no_two_functions_or_constants_have_the_same_name() -> None:
    """In `ops`, the implementations of an operator have its name; a program begins at `main`."""
    found: dict[str, list[str]] = {}
    for path in (path for path in FILES if _unit(path) not in ("hf", "ops")):
        names = set(_functions_and_constants_of(path.read_text(encoding="utf-8"))) - {"main"}
        if _unit(path) == "systems":
            names -= PARTS_OF_A_SYSTEM
        for name in names:
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    same = {name: files for name, files in found.items() if len(files) > 1}
    assert not same, f"rename all but one: {same}"
