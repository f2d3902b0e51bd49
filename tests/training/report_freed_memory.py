"""pretrain_gpt_moe.py that does not train, but says whether this process keeps freed memory."""

import sys
from unittest import mock

import psutil
import torch

from moe_parallel.launch.program import main
from moe_parallel.platform.megatron import import_megatron

MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def report(*_: object, **__: object) -> int:
    tensor = torch.ones(48 * MIB // 4)
    held = resident()
    del tensor
    print("freed memory is", "kept" if held - resident() < 24 * MIB else "returned", flush=True)
    return 0


if __name__ == "__main__":
    import_megatron()
    with mock.patch("moe_parallel.training.pretrain.pretrain", report):
        main(__file__, sys.argv[1:])
