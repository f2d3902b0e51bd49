"""The import order and the few readers of global state.

The tests read only the source (`ast`); they import nothing. A new package or top-level module needs
a place in LAYERS; otherwise `test_every_module_has_a_layer` fails.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "moe_parallel"

# From bottom to top. A module may import from its own layer (without a cycle) and those before it.
LAYERS = (
    {"_C", "errors", "console", "copies", "optional"},
    {"collective_errors", "reading"},
    {"config"},
    {"ops"},
    {"selection", "balancing", "experts", "dispatch", "parallel", "platform", "telemetry", "data"},
    {"hf", "layers"},
    {"systems"},
    {"model"},
    {"plan"},
    {"evaluation", "analysis", "library", "megatron"},
    {"training"},
    {"convert", "generation", "huggingface", "harness", "launch", "megatron_checkpoint", "tool"},
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}

# Training ends with a call of analysis, which reads only the files of the run.
ANALYSIS = "analysis"
ANALYSIS_MAY_IMPORT = (
    "errors", "optional", "reading", "config", "plan", "telemetry.metrics", ANALYSIS,
)  # fmt: skip

# Selection rules are pure functions: `Tokens` gives them data of other ranks and random numbers.
PURE = "selection"
PURE_MAY_IMPORT = ("copies", "errors", PURE)
COMMUNICATION = {"distributed", "megatron"}
RANDOM = {"Generator", "bernoulli", "manual_seed", "multinomial", "random"}

NEVER_IMPORTED = {"pretrain_gpt_moe", "tools", "tests"}
TRANSFORMER_ENGINE_FILES = {"experts.fp8", "model.attention_backends"}
# Modules whose import may fail: optional packages, our extension, two Megatron-Core versions.
FAILED_IMPORT = {"ImportError", "ModuleNotFoundError"}
MAY_MISS_AN_IMPORT = {
    "optional",
    "config.selection.selection",
    "ops.extension",
    "platform.cpu_host",
}
# Megatron-Core's global process groups, by all of their names, and the only module to read them.
# tools and tests may, too: they build Megatron-Core's own layers.
PARALLEL_STATE = {"parallel_state", "mpu", "use_mpu_process_groups"}
ITS_READER = f"{PACKAGE}.parallel"


def _modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


def _absolute(node: ast.ImportFrom, module: str) -> str:
    """The dotted name from which a `from ... import` starts, with relative dots resolved."""
    if not node.level:
        return node.module or ""
    is_package = MODULES[module].name == "__init__.py"
    parents = module.split(".")[: None if is_package else -1]
    parents = parents[: len(parents) - (node.level - 1)]
    return ".".join([*parents, *filter(None, [node.module])])


@functools.cache
def _imports(module: str) -> list[tuple[str, int]]:
    return list(_find_imports(module))


def _find_imports(module: str) -> Iterator[tuple[str, int]]:
    """Every dotted name that a module imports, anywhere in the file, with its line.

    `from a.b import c` is the module `a.b.c` if there is one, and `a.b` otherwise.
    """
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = _absolute(node, module)
            for alias in node.names:
                name = f"{start}.{alias.name}"
                is_module = name in MODULES or name == f"{PACKAGE}._C"
                yield (name if is_module else start), node.lineno


def _unit(module: str) -> str:
    """`moe_parallel.ops.native` -> `ops`; the package itself -> ``."""
    return (module.split(".") + [""])[1]


def _own_imports(module: str) -> Iterator[tuple[str, int]]:
    for name, line in _imports(module):
        if name.split(".")[0] == PACKAGE:
            yield name, line


def _at(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def test_every_module_has_a_layer() -> None:
    homeless = {_unit(name) for name in MODULES} - set(LEVEL) - {""}
    assert not homeless, f"give {sorted(homeless)} a place in LAYERS of {Path(__file__).name}"


def test_imports_go_down() -> None:
    steps_up = [
        f"{_at(module, line)}: {_unit(module)} may not import {name}"
        for module in MODULES
        if _unit(module) in LEVEL
        for name, line in _own_imports(module)
        if _unit(name) and LEVEL.get(_unit(name), len(LAYERS)) > LEVEL[_unit(module)]
    ]
    assert not steps_up, "\n".join(steps_up)


def _seen_by_type_checkers_alone(module: str) -> set[int]:
    """The lines under `if TYPE_CHECKING`."""
    blocks = [
        node.body
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {n for body in blocks for n in range(body[0].lineno, body[-1].end_lineno + 1)}


def test_the_package_itself_imports_nothing_of_its_own() -> None:
    unseen = _seen_by_type_checkers_alone(PACKAGE)
    imports = [(name, line) for name, line in _own_imports(PACKAGE) if line not in unseen]
    found = [f"{_at(PACKAGE, line)}: {name}" for name, line in imports]
    assert not found, f"`import {PACKAGE}` stays light; its __init__.py imports {found}"


def _own_imports_beyond(unit: str, allowed: tuple[str, ...]) -> list[str]:
    """The imports of a package from our packages that are not allowed."""

    def fits(name: str) -> bool:
        name = name.partition(".")[2]
        return not name or any(f"{name}.".startswith(f"{ok}.") for ok in allowed)

    return [
        f"{_at(module, line)}: {unit} may not import {name}"
        for module in MODULES
        if _unit(module) == unit
        for name, line in _own_imports(module)
        if not fits(name)
    ]


def test_analysis_reads_files_only() -> None:
    found = _own_imports_beyond(ANALYSIS, ANALYSIS_MAY_IMPORT)
    assert not found, "\n".join(found)


def test_selection_is_pure() -> None:
    found = _own_imports_beyond(PURE, PURE_MAY_IMPORT)
    for module in MODULES:
        if _unit(module) == PURE:
            names = _identifiers(module)
            drawn = {name for name in names if name.startswith("rand")} | (names & RANDOM)
            drawn = set() if module == f"{PACKAGE}.selection.tokens" else drawn
            if impure := drawn | (names & COMMUNICATION):
                found.append(f"{MODULES[module]}: reads {sorted(impure)}")
    assert not found, "\n".join(found)


def test_nothing_imports_the_programs() -> None:
    found = [
        f"{_at(module, line)}: {name}"
        for module in MODULES
        for name, line in _imports(module)
        if name.split(".")[0] in NEVER_IMPORTED
    ]
    assert not found, "\n".join(found)


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of a directed graph as a path that ends where it starts; [] if there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for after in sorted(graph.get(node, ())):
            if found := walk(after, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def test_no_circle_between_modules() -> None:
    graph = {}
    for module in MODULES:
        # A part may name the type of the whole that contains it: nothing is imported then.
        unseen = _seen_by_type_checkers_alone(module)
        imports = (name for name, line in _own_imports(module) if line not in unseen)
        graph[module] = {name for name in imports if name not in (module, PACKAGE)}
    circle = _circle(graph)
    assert not circle, " -> ".join(circle)


def test_no_circle_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        targets = {_unit(name) for name, _ in _own_imports(module)}
        graph.setdefault(_unit(module), set()).update(targets - {"", _unit(module)})
    circle = _circle(graph)
    assert not circle, " -> ".join(circle)


@pytest.mark.parametrize(
    ("graph", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}}, []),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
    ],
)
def test_the_circle_finder(graph: dict[str, set[str]], circle: list[str]) -> None:
    assert _circle(graph) == circle


def test_transformer_engine_has_two_doors() -> None:
    def names(module: str) -> Iterator[str]:
        yield from (name for name, _ in _imports(module))
        for node in ast.walk(_tree(module)):  # import_optional("transformer_engine.pytorch", ...)
            if isinstance(node, ast.Call) and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value

    files = {
        module.partition(".")[2]
        for module in MODULES
        if any(name.partition(".")[0] == "transformer_engine" for name in names(module))
    }
    assert files == TRANSFORMER_ENGINE_FILES


def test_optional_packages_are_found_in_one_way() -> None:
    found = {module.partition(".")[2] for module in MODULES if _identifiers(module) & FAILED_IMPORT}
    assert found == MAY_MISS_AN_IMPORT, "use moe_parallel.optional.import_optional"
    tools = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tools").rglob("*.py"))
        if _identifiers_of(ast.parse(path.read_text())) & FAILED_IMPORT
    ]
    assert not tools, f"use moe_parallel.optional.import_optional: {tools}"


@functools.cache
def _identifiers(module: str) -> set[str]:
    return _identifiers_of(_tree(module))


def _identifiers_of(tree: ast.Module) -> set[str]:
    """Every name in a module's code: imported, read, or part of a dotted string."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found.update(part for name in names for part in name.split("."))
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(node.value.split("."))
    return found


def test_parallel_state_has_one_reader() -> None:
    found = {module for module in MODULES if _identifiers(module) & PARALLEL_STATE}
    assert found == {ITS_READER}, f"take groups from {ITS_READER}.Groups instead: {sorted(found)}"
