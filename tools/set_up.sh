#!/bin/sh
# Prepares a virtual environment: its interpreter, the packages of pyproject.toml in the versions of
# tools/constraints.txt, and the C++ extension, which is compiled against the torch that is there.
#
#     tools/set_up.sh PYTHON VENV         e.g. tools/set_up.sh python3.12 .venv-3.12
#
# Each of the three is rebuilt only when its inputs have changed. If nothing has changed, this takes
# a fraction of a second. Progress is printed to stderr. On an error, the script prints ONE line to
# stdout, which says what is missing and what to do, and exits with 1.
set -u
cd "$(dirname "$0")/.." || exit 1
python=$1
venv=$2
log=$venv/set-up.log

say() { echo "set-up: $*" >&2; }
stop() { echo "$*"; exit 1; }
digest() { sha256sum | cut -d ' ' -f 1; }
is_made_from() { [ "$(cat "$venv/.made-from/$1" 2>/dev/null)" = "$2" ]; }
record() { mkdir -p "$venv/.made-from" && echo "$2" >"$venv/.made-from/$1"; }

check_interpreter() {
    base=$(tools/find_python.sh "$python") ||
        stop "$python does not start: install Python 3.11 or later (Debian: apt-get install" \
            "python3 python3-venv python3-dev), or name one with PYTHON=/path/to/python3"
    version=$("$base" -c 'import platform; print(platform.python_version())')
    series=${version%.*}
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "$python is Python $version: 3.11 or later is needed; name one with PYTHON=python3.12"
}

make_environment() {
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$base cannot make virtual environments: install its venv module" \
            "(Debian: apt-get install python$series-venv)"
    say "Python $version in $venv"
    rm -rf "$venv"
    "$base" -m venv "$venv" >/dev/null 2>&1 || stop "$base -m venv $venv failed: run it to see why"
    record environment "$environment"
}

check_compiler() {
    compiler=${CXX:-c++}
    command -v "${compiler%% *}" >/dev/null ||
        stop "no C++ compiler (${compiler%% *} was not found): install one (Debian: apt-get install" \
            "g++), or name one with CXX="
    include=$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] ||
        stop "no $include/Python.h, which the C++ extension needs: install Python's headers" \
            "(Debian: apt-get install python$series-dev)"
}

# Summarizes an error of pip, setup.py or a compiler in one line.
explain() {
    if grep -q -E 'Building editable.* error|Failed building|moe_parallel: building' "$log"; then
        cause=$(grep -E ': (fatal )?error: |moe_parallel: ' "$log" | grep -v ': building ' |
            head -n 1 | sed 's/^ *//')
        stop "the C++ extension did not compile (${cause:-no reason found}); the whole output is in $log"
    fi
    cause=$(grep '^ERROR: ' "$log" | tail -n 1 | cut -c 8-)
    stop "pip could not install the packages (${cause:-no reason given}): is the package registry" \
        "within reach (pip config list)? The whole output is in $log"
}

install_packages() {
    say "installing torch, megatron-core and the rest, then compiling (minutes; log in $log)"
    # The build requirements, pyproject.toml's `requires`, are installed first, so that the extension
    # is compiled against this torch and not against a second copy in a temporary environment.
    pip_install setuptools ninja torch
    install_cutlass
    pip_install --no-build-isolation --editable '.[dev]'
    record packages "$packages"
}

# Installs the headers of CUTLASS for the CUDA side. The wheel's dependencies are for its Python
# code, which is not used here.
install_cutlass() {
    { command -v nvcc && [ -z "${CUTLASS_PATH:-}" ]; } >/dev/null || return 0
    # torch warns that numpy is missing, which is installed next.
    "$venv/bin/python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
        return 0
    pip_install --no-deps nvidia-cutlass
}

build_extension() {
    install_cutlass
    say "compiling the C++ extension (log in $log)"
    run setup.py build_ext --inplace || explain
}

run() { MAX_JOBS=${MAX_JOBS:-$(nproc)} PATH=$PWD/$venv/bin:$PATH "$venv/bin/python" "$@" >>"$log" 2>&1; }
pip_install() { run -m pip install -c tools/constraints.txt "$@" || explain; }

check_extension() {
    built=$("$venv/bin/python" -c '
import torch, moe_parallel._C as c
print(c.__file__)
print(" ".join(f"{k}={v}" for k, v in sorted(c.build_info().items())))' 2>>"$log") ||
        stop "the C++ extension does not import ($(tail -n 1 "$log")); see $log"
    say "extension ready: $(echo "$built" | tail -n 1)"
    record library "$(echo "$built" | head -n 1)"
    record extension "$(extension)"
}

check_interpreter
environment="$base $version $PWD"
packages=$({ echo "$environment"; cat pyproject.toml tools/constraints.txt; } | digest)
choices="${CXX:-} ${CUDA_HOME:-} ${MOE_PARALLEL_BUILD:-} ${TORCH_CUDA_ARCH_LIST:-}
${CUTLASS_PATH:-} ${MOE_PARALLEL_OPTIMIZATION:-}"
cuda=$(nvcc --version 2>/dev/null)
sources=$(find setup.py csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum)
# The version of the torch that is installed now is in the name of a folder.
extension() { echo "$packages $choices $cuda $sources" "$venv"/lib/python*/*/torch-*-info | digest; }

is_made_from environment "$environment" && is_made_from packages "$packages" &&
    is_made_from extension "$(extension)" && [ -f "$(cat "$venv/.made-from/library")" ] && exit 0

check_compiler
is_made_from environment "$environment" || make_environment
: >"$log"
if is_made_from packages "$packages"; then build_extension; else install_packages; fi
check_extension
