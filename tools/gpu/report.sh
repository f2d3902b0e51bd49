#!/usr/bin/env bash
# Tests and measures on a machine with a GPU, in four independent calls of less than ten minutes
# each:
#
#     tools/gpu/report.sh tests [FOLDER]      the tests marked gpu, and two models that train
#     tools/gpu/report.sh operators [FOLDER]  their benchmark
#     tools/gpu/report.sh models [FOLDER]     AoE and top-p of 732M parameters against their twin;
#                                             whole models against others; sanitizers
#     tools/gpu/report.sh systems [FOLDER]    every system of examples/systems against the CPU
#
# A quarter of an hour is enough for `models`, and `operators` with MINUTES=5.
#
#   FOLDER    default: build/gpu/CARD-DATE; packed as FOLDER.tar.gz at the end
#   PYTHON    the interpreter with torch; default: .venv-3.12/bin/python if it exists, else python3
#   MINUTES   the limit of a call, 9 by default; a step gets the remaining time, but at most its own
#             limit, which grows with MINUTES
#
# It needs a GPU, torch, megatron-core, pytest, and CUTLASS's headers to build: tools/gpu/pack.sh
# packs what a machine without a network lacks. An existing extension with CUDA and CUTLASS that was
# built for this torch is used; one that is built here is copied to FOLDER for the next call. A
# failed step does not stop the others: FOLDER/CALL.md says how each ended. Exit codes: 0 all
# passed, 1 a step failed, 2 nothing could be run, explained in one line.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

started=$SECONDS
minutes=${MINUTES:-9}
python=${PYTHON:-$([ -x .venv-3.12/bin/python ] && echo .venv-3.12/bin/python || echo python3)}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/.carried${PYTHONPATH:+:$PYTHONPATH}

stop() { echo "report: $*"; exit 2; }
left() { echo $((minutes * 60 - (SECONDS - started))); }

check_machine() {
    local package
    for package in torch megatron.core pytest; do
        "$python" -c "import $package" >/dev/null 2>&1 || stop "$python has no $package: name" \
            "another with PYTHON=, or carry the package (tools/gpu/pack.sh)"
    done
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
        stop "torch sees no GPU here: nothing was built, tested or measured"
}

is_built() {
    "$python" -c 'import sys, torch, moe_parallel._C as c
info = c.build_info()
fits = info["torch"] == torch.__version__
sys.exit(not (fits and info["cuda"] and info["cutlass"]))' 2>/dev/null
}

build() {
    is_built && return
    [ -n "${CUTLASS_PATH:-}" ] || "$python" -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec("cutlass_library") is None)' ||
        stop "no CUTLASS headers to build with: pip install --no-deps nvidia-cutlass, name a" \
            "folder in CUTLASS_PATH, or carry them (tools/gpu/pack.sh)"
    export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$("$python" -c 'import torch
major, minor = torch.cuda.get_device_capability()
print("9.0a" if (major, minor) == (9, 0) else f"{major}.{minor}")')}
    MOE_PARALLEL_BUILD=cuda MAX_JOBS=${MAX_JOBS:-$(nproc)} PATH="$(dirname "$python"):$PATH" \
        timeout --kill-after=10 "$(left)" "$python" setup.py build_ext --inplace \
        >"$folder/build.log" 2>&1
    is_built || stop "the extension was not built with CUDA and CUTLASS ($(grep -m 1 -E \
        'error|moe_parallel: [^b]' "$folder/build.log" || echo "see $folder/build.log"))"
    cp moe_parallel/_C.*.so "$folder/"
}

describe() {
    "$python" - <<'PYTHON'
import datetime, platform, torch
import moe_parallel._C as extension

card = torch.cuda.get_device_properties(0)
print(f"- card: {card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}")
print(f"- torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")
print(f"- extension: {extension.build_info()}")
print(f"- date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC")
PYTHON
    echo "- driver: $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
    echo "- clocks: $(nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.limit \
        --format=csv,noheader | head -n 1)"
    echo "- commit: $(cat .carried/commit 2>/dev/null ||
        git describe --always --dirty 2>/dev/null || echo unknown)"
    echo "- command: tools/gpu/report.sh $call"
    echo
    echo "| step | result | time | last line | command |"
    echo "|---|---|---|---|---|"
}

# step NAME SECONDS COMMAND...: writes the output to NAME.log, and how it ended to CALL.md.
step() {
    local name=$1 limit=$(($2 * minutes / 9)) begin=$SECONDS rest end
    shift 2
    rest=$(left)
    [ "$rest" -lt "$limit" ] && limit=$rest
    if [ "$limit" -lt 5 ]; then
        end="not run: the time was over"
        failed+=("$name")
    elif timeout --signal=INT --kill-after=10 "$limit" "$@" >"$folder/$name.log" 2>&1; then
        end=passed
    else
        end="failed with code $?"  # 124 or 137: longer than its limit; INT lets it say what it has
        failed+=("$name")
    fi
    echo "| $name | $end | $((SECONDS - begin)) s | $(tail -n 1 "$folder/$name.log" 2>/dev/null |
        tr '|' '/' | cut -c 1-100) | \`$*\` |" | tee -a "$folder/$call.md"
}

# gpu_tests NAME SECONDS ARGUMENT...: runs tests in parallel if there is pytest-xdist, because one
# test does not keep the GPU busy.
gpu_tests() {
    local side_by_side=()
    "$python" -c 'import xdist' 2>/dev/null && side_by_side=(-n "$((($(getconf _NPROCESSORS_ONLN) + 1) / 2))")
    step "$1" "$2" "$python" -m pytest -q --full -m gpu -p no:cacheprovider \
        "${side_by_side[@]}" "${@:3}"
}

train() {
    step "train-$1" 50 "$python" pretrain_gpt_moe.py --config "examples/systems/$1.yaml" \
        --bf16 true --expert-model-parallel-size 1 --distributed-backend nccl --train-iters 20 \
        --lr-warmup-iters 2 --save "$work/$1"
}

# Tests that could wait forever run first, each file in its own process. Of the folders, only those
# with a test for a GPU are read, because tests of others import packages that may be missing here.
tests() {
    local folders
    mapfile -t folders < <(grep -rl --include='*.py' 'mark\.gpu' tests | xargs dirname | sort -u)
    gpu_tests grouped-gemm 60 tests/ops/test_grouped_gemm.py
    gpu_tests no-waiting 30 tests/ops/test_no_waiting.py
    train topk
    train aoe
    gpu_tests others 150 "${folders[@]}" --deselect tests/ops/test_grouped_gemm.py \
        --deselect tests/ops/test_no_waiting.py
}

operators() {
    step bench 300 "$python" tools/bench/run.py --device cuda --sizes goals \
        --json "$folder/bench.json"
}

models() {
    # As CUDA graphs, because the host would bound all alike.
    step training 290 "$python" tools/bench/training.py --sizes goals --turns 1 --iterations 6 \
        --cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1 \
        --json "$folder/training.json"
    # Ours, Megatron-Core's and Hugging Face's, forward and backward.
    step whole-models 100 "$python" tools/bench/models.py --device cuda --sizes gpu --turns 5 \
        --json "$folder/models.json"
    if ! command -v compute-sanitizer >/dev/null; then
        echo "| sanitizers | not run: no compute-sanitizer in PATH | 0 s | | |" |
            tee -a "$folder/$call.md"
        return
    fi
    local tool some
    some="native and (plain and 7 or several_tiles or oracle and (swiglu or merge or norm))"
    some="$some or norms_and_choices"
    for tool in memcheck racecheck synccheck; do
        step "$tool" 45 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q \
            --full -m gpu -p no:cacheprovider tests/ops -k "$some"
    done
}

systems() {
    step systems 520 "$python" tools/gpu/systems.py --json "$folder/systems.json"
}

call=${1:-}
case $call in
    tests | operators | models | systems) ;;
    *) stop "${call:-nothing} is not a command: use tools/gpu/report.sh tests, operators, models" \
        "or systems" ;;
esac
check_machine
card=$("$python" -c 'import torch; print(torch.cuda.get_device_name().split()[-1].lower())')
folder=${2:-build/gpu/$card-$(date -u +%Y-%m-%d)}
mkdir -p "$folder" || stop "$folder cannot be made: name another folder"
work=$(mktemp -d)
finish() {
    rm -rf "$work"
    tar -czf "$folder.tar.gz" -C "$(dirname "$folder")" "$(basename "$folder")"
}
trap finish EXIT
build
failed=()
{ echo "# $card: $call"; echo; describe; } >"$folder/$call.md"
"$call"

[ ${#failed[@]} -eq 0 ] || { echo "report: failed: ${failed[*]}; see $folder"; exit 1; }
echo "report: all passed; see $folder"
