"""What the server of forked ranks has imported before it forks the first one."""

import gc

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401  torch's optimizers import it when they are made

from moe_parallel.platform.megatron import import_megatron

import_megatron()

import moe_parallel.training.pretrain  # noqa: E402
import tests.distributed  # noqa: E402, F401
from moe_parallel.ops import extension  # noqa: E402

if extension.is_built():
    import moe_parallel.ops.native  # noqa: F401

# A collection in a forked process would look at a million objects of these modules, and copy the
# pages they are on.
gc.collect()
gc.freeze()
