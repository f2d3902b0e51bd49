import sys

import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.ops import extension, select_backend

EXTENSION = "moe_parallel._C"


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    import moe_parallel.ops

    monkeypatch.setitem(sys.modules, EXTENSION, None)
    monkeypatch.delitem(sys.modules, "moe_parallel.ops.native", raising=False)
    monkeypatch.delattr(moe_parallel.ops, "native", raising=False)


def test_the_extension_is_built():
    """Without the extension the other tests skip the native backend; this test fails."""
    assert extension.is_built()
    info = extension.load().build_info()
    assert info["torch"].startswith("2.")
    assert bool(info["cuda_architectures"]) == info["cuda"]


def test_auto_without_extension_is_the_reference(no_extension):
    assert select_backend("auto").name == "reference"


def test_native_without_extension_is_an_input_error(no_extension):
    with pytest.raises(InputError, match="native .* not built: .*`make set-up`") as error:
        select_backend("native")
    assert "\n" not in str(error.value)


def test_an_extension_for_another_torch_is_an_input_error(monkeypatch):
    """It is not loaded: against another torch it might crash."""
    built_for = extension.load().build_info()["torch"]
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    monkeypatch.setattr(extension.importlib, "import_module", None)
    with pytest.raises(InputError) as raised:
        extension.load()
    assert str(raised.value).startswith(
        f"the C++ extension does not fit torch 2.99.0+cpu (it was built for torch {built_for}): "
        "build it again with `make set-up` or `pip install --no-build-isolation "
    )
    assert "\n" not in str(raised.value)
