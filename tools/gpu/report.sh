#!/usr/bin/env bash
# Ten minutes on a machine with a GPU: builds the extension, tests it, measures it, and leaves one
# folder that says what was seen.
#
#     tools/gpu/report.sh [FOLDER]      default: docs/performance/results/CARD-DATE
#
#   PYTHON    the interpreter with torch; default: .venv-3.12/bin/python where that is, else python3
#   MINUTES   for all of it, 10 by default; a step gets what is left, and no more than its own limit
#
# An extension that is in place and imports is taken as it is. The steps go on after one that failed:
# README.md in the folder says of each how it ended. Exit codes: 0 all passed, 1 something failed,
# 2 nothing could be run (no GPU, no torch, no extension), said in one line.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

started=$SECONDS
minutes=${MINUTES:-10}
python=${PYTHON:-$([ -x .venv-3.12/bin/python ] && echo .venv-3.12/bin/python || echo python3)}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD

stop() { echo "report: $*"; exit 2; }
left() { echo $((minutes * 60 - (SECONDS - started))); }

check_machine() {
    "$python" -c 'import torch' 2>/dev/null || stop "$python has no torch: name another with PYTHON="
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
        stop "torch sees no GPU here: nothing was built, tested or measured"
}

build() {
    "$python" -c 'import sys, torch, moe_parallel._C as c; sys.exit(not c.build_info()["cuda"])' \
        2>/dev/null && return
    MOE_PARALLEL_BUILD=cuda MAX_JOBS=${MAX_JOBS:-$(nproc)} PATH="$(dirname "$python"):$PATH" \
        "$python" setup.py build_ext --inplace >"$work/build.log" 2>&1 ||
        stop "the extension was not built ($(grep -m 1 -E 'error|moe_parallel:' "$work/build.log"))"
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
    echo "- clocks: $(nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.limit --format=csv,noheader |
        head -n 1)"
    echo "- commit: $(git describe --always --dirty 2>/dev/null || echo unknown)"
}

# step NAME SECONDS COMMAND...: its output in NAME.log, how it ended in README.md.
step() {
    local name=$1 limit=$2 begin=$SECONDS rest end
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
        tr '|' '/' | cut -c 1-100) | \`$*\` |" | tee -a "$folder/README.md"
}

gpu_tests() { step "$1" "$2" "$python" -m pytest -q -m gpu -p no:cacheprovider "${@:3}"; }

check_machine
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
build
card=$("$python" -c 'import torch; print(torch.cuda.get_device_name().split()[-1].lower())')
folder=${1:-docs/performance/results/$card-$(date -u +%Y-%m-%d)}
mkdir -p "$folder" || stop "$folder cannot be made: name another folder"
[ -f "$work/build.log" ] && cp "$work/build.log" "$folder/"
failed=()
{
    echo "# $card"
    echo
    describe
    echo "- command: tools/gpu/report.sh $*"
    echo
    echo "| step | result | time | last line | command |"
    echo "|---|---|---|---|---|"
} >"$folder/README.md"

# What could wait for ever comes first, and alone.
gpu_tests grouped-gemm 90 tests/ops/test_grouped_gemm.py
gpu_tests fused-products 60 tests/ops/test_fused_products.py
gpu_tests no-waiting 60 tests/ops/test_no_waiting.py
gpu_tests operators 150 tests/ops --deselect tests/ops/test_grouped_gemm.py \
    --deselect tests/ops/test_fused_products.py --deselect tests/ops/test_no_waiting.py
step bench 200 "$python" tools/bench/run.py --device cuda --sizes goals \
    --json "$folder/bench.json"
# Whole models: AoE of 732 million parameters against its twin.
step training 120 "$python" tools/bench/training.py --sizes goals --turns 1 --iterations 6 \
    --json "$folder/training.json"
# What gathering on load and epilogues gain: the same step by step.
step bench-unfused 60 "$python" tools/bench/run.py --device cuda --sizes goals --fusing never \
    --ops norm_topk,routed_layer,aoe_layer --json "$folder/bench-unfused.json"
step fused-against-unfused 10 "$python" tools/bench/compare.py "$folder/bench-unfused.json" \
    "$folder/bench.json"
if command -v compute-sanitizer >/dev/null; then
    some="native and (plain and 7 or several_tiles or oracle and (swiglu or merge or norm))"
    some="$some or as_exact_as_step_by_step and plain and bfloat16 or norms_and_choices"
    for tool in memcheck racecheck; do
        step "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q \
            -m gpu -p no:cacheprovider tests/ops -k "$some"
    done
fi

[ ${#failed[@]} -eq 0 ] || { echo "report: failed: ${failed[*]}; see $folder"; exit 1; }
echo "report: all passed; see $folder"
