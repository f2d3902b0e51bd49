"""Pretrain a mixture-of-experts GPT.

    python pretrain_gpt_moe.py [--nproc-per-node N] --config FILE.yaml [--flag value ...]

`--help` lists the flags. The ranks are started by the program itself, by torchrun or by srun
(`moe_parallel.launch`); the configuration is read and checked by `moe_parallel.config`; the run
itself is `moe_parallel.training.pretrain`. Exit codes: 0 done, 2 a wrong flag, file or value (one
line says which), 3 the loss is no longer finite, 75 stopped by a signal or by its time limit (start
it again), 76 a rank hangs or is lost (start it again), 130 Ctrl-C before training began, 128 + N a
rank was killed by signal N, 1 a bug.
"""

import sys

from moe_parallel.launch.program import main

if __name__ == "__main__":
    main(__file__, sys.argv[1:])
else:  # in a process that distributed checkpointing starts, which imports Megatron-Core next
    from moe_parallel.platform.megatron import import_megatron

    import_megatron()
