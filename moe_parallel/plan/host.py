"""The calls by which the host launches the kernels of a layer.

A GPU whose kernels are shorter than the host needs to launch them waits for the host. With expert
parallelism the host waits for the sizes of the dispatch in each layer, so it cannot run ahead for
longer than a layer.
"""

from __future__ import annotations

from moe_parallel.plan.layout import Layout

#: Calls of torch's dispatcher that launch a kernel, of a micro-batch: (forward, backward). They
#: were counted in this program's layers on a CPU, where a few kernels differ from a GPU's.
DENSE_LAYER = (53, 61)
OF_EXPERTS = (39, 14)  # more than in a dense layer: scores, selection, statistics, losses
OF_DISPATCH = (22, 10)
OF_TENSOR_PARALLELISM = (6, 9)


def calls_of_layer(layout: Layout, is_moe: bool) -> int:
    """The calls for a micro-batch in a layer, forward and backward, with recomputation."""
    parts = [DENSE_LAYER]
    if is_moe:
        parts.append(OF_EXPERTS)
    if is_moe and layout.etp_ep_group.size > 1:
        parts.append(OF_DISPATCH)
    if layout.tp > 1:
        parts.append(OF_TENSOR_PARALLELISM)
    forward, backward = (sum(part) for part in zip(*parts, strict=True))
    return forward * (2 if layout.recompute else 1) + backward
