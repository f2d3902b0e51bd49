"""Pretrain a mixture-of-experts GPT.

    torchrun --nproc-per-node N pretrain_gpt_moe.py --config FILE.yaml [--flag value ...]

`--help` lists the flags. The configuration is read and checked by `moe_parallel.config`; the run
itself is `moe_parallel.training.pretrain`. Exit codes: 0 done, 2 a wrong flag, file or value (one
line says which), 3 the loss is no longer finite, 75 saved after SIGTERM or SIGUSR1, 1 a bug.
"""

import sys

from moe_parallel.platform.notices import hush_notices

hush_notices()  # before Megatron-Core is imported

from moe_parallel.training.pretrain import main  # noqa: E402

if __name__ == "__main__":  # distributed checkpointing may start processes that import this file
    main(sys.argv[1:])
