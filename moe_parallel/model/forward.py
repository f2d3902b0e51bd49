"""One micro-batch through the model, in the form that Megatron-Core's schedules call.

Shape suffixes: B sequences of a micro-batch, S tokens of a sequence; of a batch that a loss gets,
those of this rank's share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from moe_parallel.config import TrainingConfig
from moe_parallel.copies import copied_to
from moe_parallel.model.attention import own_documents
from moe_parallel.selection.tokens import positions, take, zigzag
from moe_parallel.telemetry.statistics import RoutingStatistics

Batch = Mapping[str, torch.Tensor]
Reported = dict[str, torch.Tensor]
LossOfOutput = Callable[[torch.Tensor], tuple[torch.Tensor, Reported]]


def run_micro_batches(
    chunks: list[Any],
    batches: Iterator[Batch],
    training: TrainingConfig,
    num_micro_batches: int,
    loss_of: Callable[[torch.Tensor, Batch], tuple[torch.Tensor, Reported]],
    *,
    forward_only: bool,
    cp: dist.ProcessGroup | None = None,
    statistics: RoutingStatistics | None = None,
) -> list[Reported]:
    """All micro-batches of a step through all pipeline stages, and backward unless `forward_only`.

    Args:
        chunks: this rank's model chunks.
        batches: this rank's micro-batches, on any device: tokens, position_ids and labels (int64)
            and loss_mask (float32), all [B, S]; positions begin at 0 in every document if
            `training` says that a token attends only to its own.
        training: has the size of a micro-batch, and what a token attends to.
        num_micro_batches: number of micro-batches to run.
        loss_of: (losses_BS fp32, batch) -> (loss of the micro-batch, values to report). With
            context parallelism both are of this rank's share of the sequences, and the loss is a
            part of the sum over the ranks. The batch has two entries more: `positions` of its
            tokens in their sequence (int64 [S]), and `counted`, the unmasked tokens of the
            whole micro-batch.
        forward_only: no gradients.
        cp: the ranks that share the sequences of a micro-batch, which they all read. None: this one
            has them alone.
        statistics: of the model, which then do not count a micro-batch of padding alone.

    Returns the reported values of each micro-batch; [] except on the last pipeline stage.
    """
    device = next(chunks[0].parameters()).device
    # Every virtual stage reads the same micro-batches at its own pace.
    streams = itertools.tee(batches, len(chunks))

    def forward_step(stream: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, LossOfOutput]:
        on_host = next(stream)
        mine = share_of(on_host, cp)
        batch = {name: copied_to(device, tensor) for name, tensor in mine.items()}
        documents = own_documents(on_host["position_ids"], training)
        if statistics is not None:
            statistics.is_padding = not on_host["loss_mask"].any()
        output = chunk(
            batch["tokens"],
            batch["position_ids"],
            documents,
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
        return output, lambda losses_BS: loss_of(losses_BS, batch)

    reported: list[Reported] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(streams) if len(chunks) > 1 else streams[0],
        model=chunks,
        num_microbatches=num_micro_batches,
        seq_length=training.seq_length,
        micro_batch_size=training.micro_batch_size,
        forward_only=forward_only,
    )
    return reported


def share_of(batch: Batch, cp: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """This rank's part of a micro-batch, and what it has to know of the rest."""
    length = batch["tokens"].shape[1]
    share = zigzag(length, cp.size(), cp.rank()) if cp is not None else [range(length)]
    mine = {name: take(x_BS, share, axis=1).contiguous() for name, x_BS in batch.items()}
    of_share = positions(share, batch["tokens"].device)
    return mine | {"positions": of_share, "counted": batch["loss_mask"].sum()}


def language_model_loss(losses_BS: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Reported]:
    """The sum of the losses of this rank's unmasked tokens, over all those of the micro-batch.

    Without context parallelism it is their mean. Reports sums in fp64 (nats, tokens).
    """
    mask_BS = batch["loss_mask"].to(losses_BS)
    total, tokens = (losses_BS.float() * mask_BS).sum(), mask_BS.sum()
    report = torch.stack([(losses_BS.detach().double() * mask_BS).sum(), tokens.double()])
    return total / batch["counted"].to(tokens).clamp(min=1), {"sums": report}
