# The environment of a job's processes. Every script in this folder reads this file: adapt it to your
# cluster once. A variable that you have exported before `sbatch` keeps your value.

# Modules that the nodes need, such as CUDA or the Python that made the environment:
#   module load cuda/13.0 python/3.12

# The Python environment: that of `make set-up` in this folder, .venv before .venv-3.12. For another
# one, or for python3 of a module or container, export PYTHON.
for found in .venv/bin/python .venv-*/bin/python; do
    [ -n "${PYTHON:-}" ] || [ ! -x "$found" ] || PYTHON=$PWD/$found
done
if [ -z "${PYTHON:-}" ]; then
    echo "error: $PWD has no .venv and no .venv-3.12: run make set-up there, or export PYTHON=python3" \
        "to use that of a module or container"
    exit 2
fi
echo "python: $PYTHON"

# To run in a container, name what comes before `python`, or pyxis' flags of srun:
#   RUN_IN="apptainer exec --nv moe_parallel.sif" PYTHON=python3
#   SRUN_FLAGS="--container-image=moe_parallel.sqsh --container-mounts=$PWD:$PWD --container-workdir=$PWD"
# Both are divided into words at spaces.
RUN_IN=${RUN_IN:-}
SRUN_FLAGS=${SRUN_FLAGS:-}

# Ranks on a node: one per GPU. Without GPUs, one; export RANKS_PER_NODE for another number.
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

# The network interface through which the nodes reach each other. NCCL (GPUs) and gloo (CPUs) look for
# it themselves. Name it if they choose a wrong one: the job then waits at its start and ends with a
# time-out. `ip -brief address` lists the interfaces of a node.
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# The InfiniBand cards that carry NCCL's data. Name them if a node has others, for storage for example.
#   export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3

# NCCL prints warnings, among them the reason for a failed connection. INFO prints its choices too.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Before Hopper's successor, tensor parallelism overlaps communication and products only if kernels
# start in the order in which they are issued: one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# Rows per expert differ in each step. Segments that grow keep torch's allocator from fragmenting.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# Output appears when it is printed, not when a buffer is full.
export PYTHONUNBUFFERED=1
