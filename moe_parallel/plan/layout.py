"""How a model is divided over ranks, and where the ranks of each group are.

Ranks are numbered as in Megatron-Core: tp varies fastest, then cp, then dp, then pp; for experts
etp, then ep, then edp, then pp.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_parallel.config import Config


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective: `size` ranks, `stride` apart."""

    name: str
    size: int
    stride: int

    def on_node(self, node_size: int) -> int:
        """The number of its ranks on a node; the fewest, if groups lie across nodes unequally."""
        return _fewest_on_a_node(self.size, self.stride, node_size)


@functools.cache
def _fewest_on_a_node(size: int, stride: int, node_size: int) -> int:
    """Of the ranks of a group, over all groups that divide the ranks among them."""
    block = size * stride
    first_ranks = range(0, math.lcm(block, node_size), block)
    return min(
        count
        for first in first_ranks
        for offset in range(min(stride, node_size))
        for count in Counter(
            (first + offset + place * stride) // node_size for place in range(size)
        ).values()
    )


@dataclass(frozen=True)
class Layout:
    """The sizes of the parallel groups, and how a step is cut into micro-batches."""

    ranks: int
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    virtual: int = 1  # chunks of layers of each pipeline rank
    ep: int = 1
    etp: int = 1
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    micro_batch: int = 1  # sequences
    global_batch: int = 1
    recompute: bool = False  # every layer's activations
    cp: int = 1
    recompute_modules: tuple[str, ...] = ()  # those of --recompute-modules, one by one

    @property
    def recompute_granularity(self) -> str | None:
        """The value of --recompute-granularity."""
        if self.recompute:
            return "full"
        return "selective" if self.recompute_modules else None

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.ranks // (self.etp * self.ep * self.pp)

    @property
    def micro_batches(self) -> int:
        """Of each data-parallel rank in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def experts_reduce_apart(self) -> bool:
        """Whether expert weights have other data-parallel ranks than dense weights."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def tp_group(self) -> Group:
        return Group("tp", self.tp, 1)

    @property
    def dp_group(self) -> Group:
        """The ranks that hold the same dense weights."""
        return Group("dp" if self.cp == 1 else "cp x dp", self.cp * self.dp, self.tp)

    @property
    def edp_group(self) -> Group:
        return Group("edp", self.edp, self.etp * self.ep)

    @property
    def pp_group(self) -> Group:
        return Group("pp", self.pp, self.tp * self.cp * self.dp)

    def unlike_stages(self, moe_layers: Sequence[bool]) -> Sequence[int]:
        """The stages among which is the one that needs most.

        If all layers are alike, those between the second and the last need no more than the second.
        """
        alike = len(set(moe_layers)) == 1
        return sorted({0, min(1, self.pp - 1), self.pp - 1}) if alike else range(self.pp)

    def weight_group(self, expert: bool) -> Group:
        """The ranks over which a weight's gradient is reduced."""
        return self.edp_group if expert and self.experts_reduce_apart else self.dp_group

    def chunk_layers(self, num_layers: int, stage: int, chunk: int) -> range:
        """The layers of a chunk of a pipeline rank."""
        each = num_layers // (self.pp * self.virtual)
        first = (chunk * self.pp + stage) * each
        return range(first, first + each)

    def begins(self, stage: int, chunk: int) -> bool:
        """Whether the chunk has the embedding."""
        return stage == 0 and chunk == 0

    def ends(self, stage: int, chunk: int) -> bool:
        """Whether the chunk has the output layer."""
        return stage == self.pp - 1 and chunk == self.virtual - 1


def layout_of(config: Config, ranks: int) -> Layout:
    """The layout of a valid configuration on this number of ranks."""
    parallel, training = config.parallel, config.training
    dense = config.moe.num_experts is None
    return Layout(
        ranks=ranks,
        tp=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pp=parallel.pipeline_model_parallel_size,
        virtual=config.virtual_stages or 1,
        ep=1 if dense else parallel.expert_model_parallel_size,
        etp=parallel.tensor_model_parallel_size if dense else parallel.expert_tensor_size,
        distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
        micro_batch=training.micro_batch_size,
        global_batch=training.global_batch_size,
        recompute=training.recompute_granularity == "full",
        cp=parallel.context_parallel_size,
        recompute_modules=tuple(sorted(training.recomputed_modules)),
    )
