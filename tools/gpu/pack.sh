#!/usr/bin/env bash
# Packs what tools/gpu/report.sh needs on a machine with a GPU, torch and pytest, and no network:
#
#     tools/gpu/pack.sh [FILE]          default: build/gpu-pack.tar.gz
#
#     mkdir tree && tar -xzf gpu-pack.tar.gz -C tree && tree/tools/gpu/report.sh tests /tmp/seen
#
#   PYTHON    the Python of that machine, which selects the wheels; default: python3.12
#   TORCH     the torch of that machine, such as 2.11.0+cu130; needed to carry an extension
#   MIB       the most that the pack may have; default: 64
#
# The pack contains the files that git tracks or would track, in their current state; in .carried/
# megatron-core and the headers of CUTLASS, in the versions of tools/constraints.txt, and the commit;
# and the extension for that Python, which is in a report's FOLDER once it was built there. It can also
# be built here, without a GPU, in an environment of that Python with that torch, setuptools, ninja
# and nvcc:
#
#     MOE_PARALLEL_BUILD=cuda TORCH_CUDA_ARCH_LIST=9.0a python setup.py build_ext --inplace
#
# The last lines print the content and the sizes. Exit codes: 0 packed, 2 something is missing,
# too large, or was built for another torch, explained in one line.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

file=${1:-build/gpu-pack.tar.gz}
name=${PYTHON:-python3.12}
stop() { echo "pack: $*"; exit 2; }

python=$(tools/find_python.sh "$name") || stop "$name does not start: name another with PYTHON="
mkdir -p "$(dirname "$file")" || stop "$file cannot be made: name another file"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree carried=$work/tree/.carried
mkdir -p "$carried" "$work/wheels"

# The files that git tracks or would track; without git, all files except generated ones.
sources() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files -z --cached --others --exclude-standard |
            while IFS= read -r -d '' path; do [ -f "$path" ] && printf '%s\0' "$path"; done
    else
        find . -type f -not -path './.venv*' -not -path './build/*' -not -name '*.so' -print0
    fi
    return 0
}

# carry PACKAGE PATTERN...: copies the files of its wheel that match.
carry() {
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$work/wheels" \
        -c tools/constraints.txt "$1" >"$work/pip.log" 2>&1 ||
        stop "no wheel of $1 ($(grep -m 1 '^ERROR' "$work/pip.log"))"
    "$python" - "$work"/wheels/"${1//-/_}"-*.whl "$carried" "${@:2}" <<'PYTHON'
import fnmatch, sys, zipfile

wheel, folder, *patterns = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    archive.extractall(folder, [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns)])
PYTHON
}

sources | tar -c --null --files-from=- | tar -x -C "$tree" || stop "the sources could not be copied"
git describe --always --dirty >"$carried/commit" 2>/dev/null || echo unknown >"$carried/commit"
carry megatron-core '*'
carry nvidia-cutlass 'cutlass_library/__init__.py' 'cutlass_library/source/include/*'
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
extension=moe_parallel/_C$suffix
if [ ! -f "$extension" ] || [ -n "$(find setup.py csrc -newer "$extension" -print -quit)" ]; then
    echo "pack: no extension for $name that is newer than csrc: it is built there (minutes)"
elif [ -z "${TORCH:-}" ]; then
    echo "pack: the extension stays here, and is built there (minutes): TORCH does not say for which"
else
    grep -qaF "$TORCH" "$extension" || stop "$extension was not built for torch $TORCH: build it" \
        "with that torch, or delete it, and it is built there"
    cp "$extension" "$tree/moe_parallel/"
fi

tar -czf "$work/pack" -C "$tree" . || stop "the pack could not be written"
(cd "$tree" && du -sh .carried/* moe_parallel/*.so 2>/dev/null)
kib=$(($(stat -c %s "$work/pack") / 1024))
[ "$kib" -le $((${MIB:-64} * 1024)) ] || stop "the pack has $kib KiB, more than ${MIB:-64} MiB:" \
    "move large files that git does not ignore out of the tree"
mv "$work/pack" "$file" || stop "$file could not be written"
echo "pack: $file, $kib KiB"
