"""An optional package is missing, is broken, or needs something that the machine lacks."""

import sys
from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.optional import INSTALL, import_optional

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Create `a_package` with a module `part` that has the given source."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> None:
        folder = tmp_path / "a_package"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "part.py").write_text(source)

    yield write
    for name in ("a_package", "a_package.part"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.part"])
def test_what_is_missing_is_named_with_the_command_that_installs_it(name):
    with pytest.raises(InputError) as raised:
        import_optional(name, "--flag x")
    assert str(raised.value) == (
        "--flag x needs no_such_package, which is not installed: pip install no_such_package"
    )


def test_the_name_on_the_index_may_be_another(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match="needs faiss, .*: pip install faiss-cpu$"):
        import_optional("faiss", "--flag")


def test_a_package_that_lacks_another_is_broken_not_missing(package):
    package("import a_module_that_it_would_need")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_it_would_need"):
        import_optional("a_package.part", "--flag")


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_a_library_that_the_machine_lacks_is_the_reason(package, kind):
    package(f"raise {kind.__name__}('libcudart.so.13: cannot open\\nshared object file')")
    with pytest.raises(InputError) as raised:
        import_optional("a_package.part", "--flag")
    assert str(raised.value) == (
        "--flag needs a_package, which cannot be imported here (libcudart.so.13: cannot open "
        "shared object file): pip install a_package"
    )


def test_versions_are_those_of_pyproject():
    declared = PYPROJECT.read_text()
    for command in INSTALL.values():
        for requirement in (word.strip("'") for word in command.split() if ">=" in word):
            assert f'"{requirement}"' in declared
