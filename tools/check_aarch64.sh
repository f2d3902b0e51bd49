#!/usr/bin/env bash
# Compiles the CPU side for aarch64 and runs its kernels there: on x86-64 with a cross-compiler and
# an emulator (Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static).
#
#   tools/check_aarch64.sh [PYTHON]    PYTHON has torch, for its headers; default: python3
#
# If the cross-compiler, the emulator or torch is missing, it says so and passes.
set -euo pipefail
cd "$(dirname "$0")/.."

compiler=${CXX_AARCH64:-aarch64-linux-gnu-g++}
if ! command -v "$compiler" >/dev/null; then
    echo "check_aarch64: skipped: no $compiler (Debian: apt-get install g++-aarch64-linux-gnu)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-std=c++20 -O2 -Wall -Wextra -Werror)

"$compiler" "${flags[@]}" -static tests/csrc/kernels.cpp csrc/cpu/{capability,portable}.cpp \
    -o "$work/kernels"
echo "check_aarch64: the kernels compile"

if headers=$("${1:-python3}" -c 'from torch.utils import cpp_extension
print(*("-isystem" + path for path in cpp_extension.include_paths()))' 2>/dev/null); then
    for source in csrc/cpu/*.cpp; do
        # shellcheck disable=SC2086  # several flags
        "$compiler" "${flags[@]}" -fsyntax-only $headers "$source"
    done
    echo "check_aarch64: csrc/cpu compiles against torch's headers"
else
    echo "check_aarch64: not compiled against torch's headers: ${1:-python3} has no torch"
fi

if emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64); then
    "$emulator" "$work/kernels"
else
    echo "check_aarch64: not run: no qemu-aarch64 (Debian: apt-get install qemu-user-static)"
fi
