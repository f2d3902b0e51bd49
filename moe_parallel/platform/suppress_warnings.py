"""Suppresses messages of Megatron-Core, on import and building, that users cannot act on."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Notice:
    """A message, identified by its beginning (for `warnings` a regular expression), and the reason
    why it is not shown."""

    beginning: str
    reason: str
    logger: str | None = None  # None: the message comes through `warnings`
    category: type[Warning] = UserWarning

    def suppress(self) -> None:
        if self.logger is None:
            warnings.filterwarnings("ignore", message=self.beginning, category=self.category)
        else:
            logger = logging.getLogger(self.logger)
            logger.addFilter(lambda record: not str(record.msg).startswith(self.beginning))


NOTICES = (
    Notice("full scope is deprecated", "about a default of Megatron-Core's own"),
    Notice("MimoModelConfig is experimental", "no such model is used here"),
    Notice(
        "The .grad attribute of a Tensor that is not a leaf",
        "Megatron-Core's distributed optimizer looks for gradients in its shards of the weights",
    ),
    Notice(
        "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated",
        "Megatron-Core calls them",
        category=FutureWarning,
    ),
    Notice(
        "If you are using transformer_engine as the transformer implementation",
        "attention is not Transformer Engine's; docs/parallelism.md says what core_attn saves",
    ),
    Notice("Apex is not installed", "norms and products are our own"),
    Notice(
        "Transformer Engine and Apex are not installed",
        "torch's fused Adam serves; --fp8-format says itself what it needs",
    ),
    Notice(
        "Using a large number of experts",
        "routers compute in fp32 here, whatever the option of Megatron-Core's own router is",
    ),
    Notice(
        r"barrier\(\): using the device under current context",
        "each rank has chosen its GPU before",
    ),
    Notice(
        "invalid escape sequence",
        "in a file of Megatron-Core, when Python compiles it first",
        category=SyntaxWarning,
    ),
    Notice(
        "Could not determine rank from torch.distributed",
        "a tool of one process has no rank",
    ),
    Notice(
        "DistributedDataParallel: full_param_layout not provided",
        "Megatron-Core computes the layout itself",
        logger="megatron.core.distributed.distributed_data_parallel",
    ),
    Notice(
        "Unknown MLP type",
        "our layers are given their process groups by their spec, and need no others",
        logger="megatron.core.transformer.transformer_layer",
    ),
    Notice(
        "GPTModel IS DEPRECATED",
        "0.16.1 has no successor to it",
        logger="megatron.core.models.gpt.gpt_model",
    ),
)

#: They say what a host without a GPU lacks.
NOTICES_ABOUT_GPUS = (
    Notice("No CUDA runtime is found", "there is no GPU", logger="torch.utils.cpp_extension"),
)


def suppress_warnings() -> None:
    """Suppress these messages. Call it before the first import of megatron.core."""
    for notice in NOTICES if torch.cuda.is_available() else NOTICES + NOTICES_ABOUT_GPUS:
        notice.suppress()
