#!/usr/bin/env bash
# Runs the operators' quick tests on an extension with the address and undefined-behavior sanitizers.
# A read or write outside its memory, a signed overflow or a misaligned access ends the tests.
#
#     tools/check_sanitizers.sh PYTHON [OPTION OF PYTEST]...
#
#   PYTHON    of an environment with the packages, e.g. .venv/bin/python
#   OPTION    e.g. --full for all combinations of their parameters
#
# Builds in a copy of the tree, for the CPU, in about three minutes of one core.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${1:?usage: tools/check_sanitizers.sh PYTHON}")
compiler=${CXX:-c++}

runtimes=()
for name in libasan.so libubsan.so; do
    path=$($compiler -print-file-name=$name)
    [ -e "$path" ] || { echo "sanitizers: skipped, $compiler has no $name"; exit 0; }
    runtimes+=("$path")
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r setup.py pyproject.toml csrc moe_parallel tests tools "$work"
cd "$work"
rm -f moe_parallel/*.so

sanitize=-fsanitize=address,undefined
CFLAGS="$sanitize -fno-sanitize-recover=all -fno-omit-frame-pointer" LDFLAGS=$sanitize \
    MOE_PARALLEL_BUILD=cpu MOE_PARALLEL_OPTIMIZATION=-O1 PATH="$(dirname "$python"):$PATH" \
    "$python" setup.py -q build_ext --inplace >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }

# Leak detection is off, because Python frees nothing at its end. Tests that start interpreters or
# compilers are left out; they test other things.
PYTHONPATH=$work LD_PRELOAD="${runtimes[*]}" ASAN_OPTIONS=detect_leaks=0 \
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -q -n 2 \
    -p no:cacheprovider -k "not reference" tests/ops \
    --deselect tests/ops/test_capability.py --deselect tests/ops/test_backends.py "${@:2}"
