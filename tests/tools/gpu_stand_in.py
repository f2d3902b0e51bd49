"""A simulated interpreter on a machine with a GPU, for tools/gpu/report.sh on other machines.

    PYTHON=gpu_stand_in.py tools/gpu/report.sh ...

It answers calls to torch and to the extension itself. Tests are collected and not run. The tools
run unchanged until they would start a kernel and find no GPU. The packages named in
STAND_IN_LACKS are missing.
"""

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

NAMES = ["torch", "megatron", "megatron.core", "pytest", "xdist", "moe_parallel._C"]
LACKS = os.environ.get("STAND_IN_LACKS", "").split(",")
VERSION = "2.11.0"
BUILT = {
    "cuda": "extension" not in LACKS,
    "cutlass": "cutlass" not in LACKS,
    "torch": "2.13.0" if "fitting" in LACKS else VERSION,
}
CARD = SimpleNamespace(name="NVIDIA Stand-in", total_memory=2**37, major=9, minor=0)


def answer(code: str) -> None:
    for name in NAMES:
        sys.modules[name] = None if name in LACKS else ModuleType(name)
    if "cutlass" in LACKS:
        sys.modules["cutlass_library"] = None
    if torch := sys.modules["torch"]:
        torch.__version__, torch.version = VERSION, SimpleNamespace(cuda="13.0")
        torch.cuda = SimpleNamespace(
            is_available=lambda: "gpu" not in LACKS,
            get_device_name=lambda: CARD.name,
            get_device_properties=lambda index: CARD,
            get_device_capability=lambda: (CARD.major, CARD.minor),
        )
    sys.modules["moe_parallel._C"].build_info = lambda: BUILT
    exec(code, {"__name__": "__main__"})


def run(arguments: list[str]) -> int:
    if "pytest" in arguments:
        arguments += ["--collect-only", "-n", "0", "--gpu", "-p", "no:timeout"]
    return subprocess.run([sys.executable, *arguments]).returncode


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        answer(sys.argv[2])
    elif sys.argv[1] == "-":
        answer(sys.stdin.read())
    else:
        sys.exit(run(sys.argv[1:]))
