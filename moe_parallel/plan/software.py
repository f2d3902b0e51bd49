"""Features of other training software that change the time of a step.

They are used to plan published runs of that software. The defaults of `Software` describe this
program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_parallel.plan import host
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.messages import DISPATCH, REDUCE_SCATTER, TENSOR, Collective, Wire
from moe_parallel.plan.shape import PlannedExperts, Shape
from moe_parallel.plan.tokens import tokens_of
from moe_parallel.plan.weights import EXPERTS
from moe_parallel.plan.work import Work, traffic

#: The share of the multiprocessors that messages take while products run: 20 of 132 (DeepSeek-V3's
#: report, arXiv 2412.19437, section 3.2.2).
SHARE_OF_MESSAGES = 20 / 132

#: Bytes of traffic for each number of the experts' outputs, forward and backward, of their biases.
#: Counted in `TEGroupedMLP._apply_bias` of Megatron-Core 0.16, operator by operator: the bias by
#: the probability in fp32 (4), its sum with the output (10), their concatenation over experts (8),
#: rounded to bf16 (6); back: to fp32 (6), to bf16 (6), the gradients of biases (12) and of
#: probabilities (12), concatenation (4).
BIAS_BYTES = (28, 40)


#: Parts of a layer that a program may run as CUDA graphs, without calls of the host.
WHOLE_LAYER, ATTENTION_GRAPH, ROUTER_GRAPH = "layer", "attention", "router"


@dataclass(frozen=True)
class Software:
    """What a program does differently from this one."""

    #: Dispatch of one micro-batch runs while another one computes (Megatron-Core's
    #: overlap_moe_expert_parallel_comm).
    hides_dispatch: bool = False
    #: A row crosses the network once for each node, and reaches each rank once, whatever the number
    #: of its experts there (DeepEP, HybridEP).
    once_per_node: bool = False
    #: The most nodes with experts of a token, if its routing limits them.
    most_nodes: int | None = None
    #: Outputs of experts have biases, by `BIAS_BYTES`.
    expert_biases: bool = False
    #: Tensor-parallel messages run during the products whose factor or result they are, in as many
    #: pieces as ranks (Transformer Engine's userbuffers). The first piece of a gathered factor is
    #: at hand; the last one of a result that is reduced is sent when the product is over.
    hides_tensor: bool = False
    #: Kernels of the experts of a rank are launched one by one.
    expert_by_expert: bool = False
    #: Calls that round a tensor to FP8, where these are not part of another kernel.
    rounding_calls: int = 0
    #: The parts of a layer that are CUDA graphs.
    graphs: tuple[str, ...] = ()
    #: Calls of the host for the parts of a layer.
    host_calls: host.HostCalls = host.OURS

    def kernels_of_layer(self, shape: Shape, layout: Layout, is_moe: bool) -> int:
        """The kernels of a layer for a micro-batch, forward and backward."""
        kernels = host.calls_of_layer(layout, is_moe, self.host_calls) + self._roundings
        if not is_moe:
            return kernels + self._roundings
        if self.expert_by_expert:
            assert shape.experts is not None
            of_expert = host.PRODUCTS_OF_EXPERT + host.ROUNDINGS_OF_EXPERT * self.rounding_calls
            of_expert += host.OF_EXPERT_BIAS * self.expert_biases
            kernels += of_expert * shape.experts.number // layout.ep
        return kernels

    def calls_of_layer(self, shape: Shape, layout: Layout, is_moe: bool) -> int:
        """The calls by which the host launches these kernels: those outside of CUDA graphs."""
        if WHOLE_LAYER in self.graphs:
            return 0
        calls = self.kernels_of_layer(shape, layout, is_moe)
        if ATTENTION_GRAPH in self.graphs:
            calls -= sum(self.host_calls.attention) + self._roundings
        if ROUTER_GRAPH in self.graphs and is_moe:
            calls -= sum(self.host_calls.experts)
        return calls

    @property
    def _roundings(self) -> int:
        """The kernels that round for the two linear layers of attention, or of a dense layer."""
        return 2 * host.ROUNDINGS_OF_LINEAR * self.rounding_calls

    def work_of_layer(self, shape: Shape, layout: Layout, is_moe: bool) -> list[Work]:
        """What a layer computes beyond this program's."""
        if not (is_moe and self.expert_biases):
            return []
        numbers = tokens_of(shape, layout).received * shape.hidden
        forward, backward = (each * numbers for each in BIAS_BYTES)
        return [traffic("biases of the experts", EXPERTS, forward, backward)]

    def wire(self, message: Collective, shape: Shape, layout: Layout, node_size: int) -> Wire:
        """The bytes that a rank sends in one operation."""
        if self.hides_tensor and message.purpose == TENSOR:
            return message.wire(node_size).times(
                1 / layout.tp if message.kind == REDUCE_SCATTER else 0.0
            )
        if not self.once_per_node or message.purpose != DISPATCH:
            return message.wire(node_size)
        assert shape.experts is not None
        group = message.group
        rows = tokens_of(shape, layout).sent * layout.etp * (group.size - 1) / group.size
        row = message.size / rows  # bytes of a choice
        tokens = tokens_of(shape, layout).routed
        here = group.on_node(node_size)
        nodes, ranks = self._places(shape.experts, group.size, group.size // here)
        # A copy for a node arrives at one of its ranks, and goes on to those that need it.
        on_node = tokens * ranks * row * (here - 1) / here
        network = tokens * nodes * row * (1 - here / group.size)
        return Wire(on_node, network)

    def _places(self, experts: PlannedExperts, ranks: int, nodes: int) -> tuple[float, float]:
        """The mean numbers of nodes and of ranks with experts of a token, if loads are balanced."""
        allowed = min(nodes, self.most_nodes or nodes)
        n, k = experts.number * allowed // nodes, round(experts.per_token)
        return taken_places(n, k, allowed), taken_places(n, k, ranks * allowed // nodes)


def taken_places(experts: int, choices: int, places: int) -> float:
    """The mean number of equal places that hold one of some different experts chosen at random."""
    without = experts - experts // places
    return places * (1 - math.comb(without, choices) / math.comb(experts, choices))


def exposed_dispatch(dispatch: float, computed: float, layout: Layout, hides: bool) -> float:
    """Seconds by which dispatch makes a step longer.

    Where a forward and a backward pass of different micro-batches alternate, dispatch runs during
    the products, from which it takes multiprocessors. The first forward passes of a step have no
    such partner, nor have the last backward passes.

    Args:
        dispatch: seconds of all of a step's dispatch.
        computed: seconds of a step's computation in layers.
        layout: of the run.
        hides: whether dispatch runs during computation.
    """
    if not hides:
        return dispatch
    passes = layout.virtual * layout.micro_batches
    first = layout.pp - 1
    if layout.virtual > 1:  # Megatron-Core's interleaved schedule
        first = 2 * first + (layout.virtual - 1) * layout.pp
    beside = max(0.0, 1 - first / passes)
    within = max(beside * dispatch * SHARE_OF_MESSAGES, beside * (dispatch - computed))
    return (1 - beside) * dispatch + within
