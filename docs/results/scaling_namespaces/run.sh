#!/bin/bash
# The studies of this folder, on a cluster of namespaces, each job after the one before:
#
#   python -m tests.cluster --rate 100mbit 16 docs/results/scaling_namespaces/run.sh runs/scaling
#
# As root, in the checkout. The same command continues. The report of each study is in its folder.
set -euo pipefail
studies=${1:?name a folder for the studies}
PYTHON=${PYTHON:-python}
here=docs/results/scaling_namespaces
export PYTHON OMP_NUM_THREADS=1
mkdir -p "$studies"

# What that many ranks of a node measured, all at the same time, before the studies.
for ranks in 1 2; do
    git show "0b7eb0f:$here/node_x$ranks.json" > "$studies/node_x$ranks.json"
done

# study NAME RANKS WORDS...: the cells that are not finished, then the report.
study() {
    local name=$1 ranks=$2
    shift 2
    "$PYTHON" tools/study/scaling.py run "$studies/$name" --config "$here/model.yaml" \
        --ranks-per-node "$ranks" --sbatch="--dependency=singleton --gpus-per-node 0" "$@"
    while [ -n "$(squeue --noheader)" ]; do sleep 1; done
    "$PYTHON" tools/study/scaling.py report "$studies/$name" --warm-up 4 --node "$studies/node_x$ranks.json"
    echo "$name ended after $SECONDS s"
}

study strong 1 --nodes 1 2 4 8 16
study weak 1 --nodes 1 2 4 8 16 --weak
study ep 2 --nodes 2 --vary expert-model-parallel-size=1,2,4
study tp 2 --nodes 2 --vary tensor-model-parallel-size=1,2,4
study pp 2 --nodes 2 --vary pipeline-model-parallel-size=1,2,4
study cp 2 --nodes 2 --vary context-parallel-size=1,2,4
study batch 2 --nodes 2 --vary micro-batch-size=1,2,4
study d_low 2 --nodes 2 --vary expert-selection=aoe aoe-low-rank-size=8,16,32
study n 2 --nodes 2 --vary num-experts=4,8,16 expert-model-parallel-size=4
