"""Builds the C++ extension moe_parallel._C, with CUDA kernels where torch and nvcc allow it.

A wheel also contains the programs and examples, for the commands of moe_parallel/console.py.

Everything else about the package is in pyproject.toml. These variables steer the build:

MOE_PARALLEL_BUILD         auto (default), cpu or cuda
MOE_PARALLEL_OPTIMIZATION  the compilers' level, -O3 by default
TORCH_CUDA_ARCH_LIST       the GPU architectures, "8.0+PTX;9.0a" by default
CUTLASS_PATH               CUTLASS's source, for grouped products on tensor cores that do not wait
                           for the GPU; by default that of the wheel nvidia-cutlass, if it is
                           installed
MAX_JOBS                   number of compilers that run at a time, 2 by default
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
EXTENSION = "moe_parallel._C"
HOPPER = "9.0a"
DEFAULT_ARCHITECTURES = f"8.0+PTX;{HOPPER}"  # A100, H100 and H200, and later ones through PTX


class BuildError(SystemExit):
    """Ends the build with one line instead of a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"moe_parallel: {message}")


try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise BuildError(
        "torch is needed to build the C++ extension: "
        "`pip install -c tools/constraints.txt torch setuptools ninja`, "
        "then `pip install --no-build-isolation -e .`"
    ) from None


def find_cuda() -> tuple[Path | None, str]:
    """The CUDA toolkit to build with, or None and the reason for building without one."""
    wish = os.environ.get("MOE_PARALLEL_BUILD", "auto")
    if wish not in ("auto", "cpu", "cuda"):
        raise BuildError(f"MOE_PARALLEL_BUILD is {wish!r}: it must be auto, cpu or cuda")
    if wish == "cpu":
        return None, "MOE_PARALLEL_BUILD=cpu"
    home, problem = _toolkit_for_torch()
    if home is None and wish == "cuda":
        raise BuildError(f"MOE_PARALLEL_BUILD=cuda, but {problem}")
    return home, problem


def _toolkit_for_torch() -> tuple[Path | None, str]:
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is a build without CUDA"
    home = _toolkit_home()
    if home is None:
        return None, "nvcc was found neither in CUDA_HOME nor on the PATH"
    text = subprocess.run(
        [home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True
    ).stdout
    version = re.search(r"release (\d+\.\d+)", text)
    if version is None or version[1].split(".")[0] != torch.version.cuda.split(".")[0]:
        found = version[1] if version else "unknown"
        return None, f"nvcc is CUDA {found}, torch was built for CUDA {torch.version.cuda}"
    return home, ""


def _toolkit_home() -> Path | None:
    """CUDA_HOME, or the folder that the nvcc on the PATH reports (it may be a wrapper)."""
    if home := os.environ.get("CUDA_HOME"):
        return Path(home) if (Path(home) / "bin" / "nvcc").exists() else None
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    plan = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    return Path(top[1]).resolve() if top else None


def cuda_wheel_headers(home: Path) -> list[str]:
    """Headers that torch's headers need and the toolkit lacks, from the wheels that torch
    installed."""
    if (home / "include" / "cublas_v2.h").exists():
        return []
    major = torch.version.cuda.split(".")[0]
    headers = Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{major}" / "include"
    if not (headers / "cublas_v2.h").exists():
        raise BuildError(
            f"cublas_v2.h is neither in {home}/include nor in {headers}: install the cuBLAS, "
            "cuSPARSE and cuSOLVER headers, or build with MOE_PARALLEL_BUILD=cpu"
        )
    return [str(headers)]


def find_cutlass() -> Path | None:
    """The headers of CUTLASS."""
    if path := os.environ.get("CUTLASS_PATH"):
        include = Path(path) / "include"
        if not (include / "cutlass" / "cutlass.h").exists():
            raise BuildError(f"CUTLASS_PATH is {path}, where there is no include/cutlass/cutlass.h")
        return include
    wheel = importlib.util.find_spec("cutlass_library")  # of the wheel nvidia-cutlass
    if wheel is None or wheel.origin is None:
        return None
    include = Path(wheel.origin).parent / "source" / "include"
    return include if (include / "cutlass" / "cutlass.h").exists() else None


def wants_hopper() -> bool:
    return HOPPER in os.environ["TORCH_CUDA_ARCH_LIST"]  # or with +PTX


def write_build_config(cuda: bool, cutlass: bool) -> Path:
    """Write the header that records what is built."""
    architectures = os.environ["TORCH_CUDA_ARCH_LIST"] if cuda else ""
    return write_if_changed(
        "build_config.h",
        "#pragma once\n"
        f"#define MOE_PARALLEL_BUILT_WITH_CUDA {str(cuda).lower()}\n"
        f"#define MOE_PARALLEL_BUILT_WITH_CUTLASS {str(cutlass).lower()}\n"
        f'#define MOE_PARALLEL_BUILT_FOR_TORCH "{torch.__version__}"\n'
        f'#define MOE_PARALLEL_CUDA_ARCHITECTURES "{architectures}"\n'
        f"#define MOE_PARALLEL_BUILT_FOR_HOPPER {str(cuda and wants_hopper()).lower()}\n",
    )


def write_operators(parts: list[Path]) -> Path:
    """Write the file that includes all operators. Each includes torch's headers, which take longer
    to parse than an operator to compile: together they compile in a seventh of the time. The names
    in their unnamed namespaces must therefore differ."""
    return write_if_changed("operators.cpp", "".join(f'#include "{part}"\n' for part in parts))


def write_if_changed(name: str, text: str) -> Path:
    """Write a file of the build folder. If it changes, old objects are recompiled."""
    path = ROOT / "build" / f"config-{sysconfig.get_config_var('SOABI')}" / name
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def describe_extension(home: Path | None, cutlass: Path | None):
    cuda = home is not None
    header = write_build_config(cuda, cutlass is not None)
    csrc = ROOT / "csrc"
    operators, kernels = ["*.cpp"], ["cpu/*.cpp"]
    if cuda:
        operators += ["cuda/*.cpp"]
        kernels += ["cuda/*.cu"]
    if cutlass:
        kernels += ["cuda/cutlass/ampere_*.cu", "cuda/cutlass/products.cu"]
        kernels += ["cuda/cutlass/hopper_*.cu"] * wants_hopper()
    parts = [p for pattern in operators for p in sorted(csrc.glob(pattern))]
    sources = [write_operators(parts), *(p for pattern in kernels for p in csrc.glob(pattern))]
    headers = [*csrc.rglob("*.h"), *csrc.rglob("*.cuh"), header]
    warnings = ["-Wall", "-Wextra"]
    # Torch's headers are system headers, so that our warnings do not apply to them. OpenMP is
    # compiled in but not linked: torch brings the runtime, and two would not share their threads.
    system = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    # A build for checks, which nobody times, may ask for less: it compiles in a third of the time.
    optimization = os.environ.get("MOE_PARALLEL_OPTIMIZATION", "-O3")
    flags = {"cxx": [optimization, "-g0", "-fopenmp", *warnings, *system]}
    if cuda:
        flags["cxx"].append("-DMOE_PARALLEL_CUDA")
        flags["nvcc"] = [optimization, "-DMOE_PARALLEL_CUDA", "-Xcompiler", ",".join(warnings)]
    if cutlass:
        # An assert is a call, and ptxas serializes the products of wgmma across calls. 2908 is
        # about captures of `this` in CUTLASS.
        flags["nvcc"] += ["-DNDEBUG", "-diag-suppress=2908", f"-isystem={cutlass}"]
    kind = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    return kind(
        EXTENSION,
        sorted(str(p.relative_to(ROOT)) for p in sources),
        include_dirs=[str(header.parent), *(cuda_wheel_headers(home) if home else [])],
        depends=[str(p) for p in [*parts, *headers, ROOT / "setup.py"]],
        extra_compile_args=flags,
    )


class BuildExtension(cpp_extension.BuildExtension):
    """torch's builder, which first prints one line that says what is built and why."""

    def finalize_options(self) -> None:
        wants_force = self.force
        super().finalize_options()
        self.force = wants_force  # torch's builder sets it, and would link again without a change
        # Ninja does not see that torch's headers changed, because they are system headers.
        self.build_temp += f"-torch-{torch.__version__}"

    def run(self) -> None:
        compiler = os.environ.get("CXX", "c++").split()[0]
        if shutil.which(compiler) is None:
            raise BuildError(
                f"the C++ compiler {compiler!r} was not found: install one "
                "(on Debian `apt install g++`), or name it in CXX"
            )
        print(f"moe_parallel: building {EXTENSION} {WHAT}", file=sys.stderr)
        super().run()

    def build_extension(self, extension) -> None:
        """Compiles what serves Hopper alone for Hopper alone. For other architectures CUTLASS's
        kernels are empty, yet cost half a minute a file, and our own has no instructions."""
        wanted = os.environ["TORCH_CUDA_ARCH_LIST"]
        hopper = [s for s in extension.sources if "hopper" in Path(s).name]
        if hopper and wants_hopper():
            os.environ["TORCH_CUDA_ARCH_LIST"] = HOPPER
            extension.sources = [s for s in extension.sources if s not in hopper]
            extension.depends += hopper
            extension.extra_objects += self.compiler.compile(
                hopper,
                output_dir=self.build_temp,
                include_dirs=extension.include_dirs,
                extra_postargs=extension.extra_compile_args,
            )
            os.environ["TORCH_CUDA_ARCH_LIST"] = wanted
        super().build_extension(extension)


class BuildPrograms(build_py):
    """Adds the programs and the examples to the package, unless the installation is editable."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        programs = Path(self.build_lib) / "moe_parallel" / "programs"
        for path in (ROOT / "pretrain_gpt_moe.py", *ROOT.glob("tools/*.py"), *example_files()):
            copy = programs / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def example_files() -> list[Path]:
    return [p for suffix in ("yaml", "py") for p in ROOT.glob(f"examples/**/*.{suffix}")]


os.chdir(ROOT)  # source paths are relative to it
os.environ.setdefault("MAX_JOBS", "2")
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
CUDA_HOME, REASON = find_cuda()
CUTLASS = find_cutlass()
if CUDA_HOME is None:
    WHAT = f"for the CPU only ({REASON})"
else:
    WITH = f"with CUTLASS ({CUTLASS})" if CUTLASS else "without CUTLASS (no nvidia-cutlass)"
    WHAT = f"with CUDA for {os.environ['TORCH_CUDA_ARCH_LIST']} ({CUDA_HOME}), {WITH}"
    cpp_extension.CUDA_HOME = str(CUDA_HOME)

setup(
    ext_modules=[describe_extension(CUDA_HOME, CUTLASS if CUDA_HOME else None)],
    cmdclass={
        "build_ext": BuildExtension.with_options(no_python_abi_suffix=False),
        "build_py": BuildPrograms,
    },
)
