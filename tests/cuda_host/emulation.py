"""Our own kernels of csrc/cuda, compiled for the CPU, in place of csrc/cpu.

    python -m tests.cuda_host.emulation LIBRARY PYTEST_ARGUMENT...

This command runs pytest, and the extension's CPU tensors go through these kernels. The library is
loaded with its symbols first, so that the extension's calls of run_on_cpu() find those of
run_on_cpu.cpp.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LIBRARY = "libcuda_host.so"
HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# A misaligned vector, an index outside a shared array, an overflow and similar errors end the
# process.
SANITIZERS = "-fsanitize=alignment,bounds,shift,signed-integer-overflow"
FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *(SANITIZERS, "-fsanitize-undefined-trap-on-error"),
    "-U_FORTIFY_SOURCE",  # it forbids the jumps from one fiber's stack to another's
    *("-DMOE_PARALLEL_CUDA", f"-I{HERE / 'include'}", f"-I{CSRC}", f"-I{CSRC / 'cuda'}"),
]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++").split()[0])


def build(folder: Path) -> Path:
    """Build the library in `folder`; raises AssertionError with the compiler's output."""
    sources = [*sorted(CSRC.glob("cuda/*.cu")), *sorted(HERE.glob("*.cpp"))]
    return link([compile_for_cpu(source, folder) for source in sources], folder)


def compile_for_cpu(source: Path, folder: Path) -> Path:
    compiled = folder / f"{source.name}.o"
    _run(compiler(), *FLAGS, "-x", "c++", "-c", source, "-o", compiled)
    return compiled


def link(compiled: Iterable[Path], folder: Path) -> Path:
    library = folder / LIBRARY
    _run(compiler(), "-shared", *compiled, "-o", library)
    return library


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def structure(**fields: type) -> type[ctypes.Structure]:
    """A struct of csrc/, for ctypes."""
    return type("Task", (ctypes.Structure,), {"_fields_": list(fields.items())})


def load(library: Path | str, *, in_front: bool = False) -> ctypes.CDLL:
    """`in_front`: an extension that is loaded afterward calls these kernels instead of its own."""
    scope = os.RTLD_GLOBAL if in_front else os.RTLD_LOCAL
    loaded = ctypes.CDLL(str(library), mode=scope | os.RTLD_NOW)
    for count in (loaded.tasks_run, loaded.squares_summed):
        count.restype = ctypes.c_int64
    return loaded


def main(library: str, *arguments: str) -> int:
    kernels = load(library, in_front=True)  # before any import of the extension

    import pytest

    status = pytest.main(list(arguments))
    print(f"tasks on the kernels of csrc/cuda: {kernels.tasks_run()}")
    print(f"products that summed their squares: {kernels.squares_summed()}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
