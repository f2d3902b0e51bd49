"""What the parts of a model hold, keep, compute and send: counted in the real model on nothing.

The model is built with two layers of each kind, without storage, for one rank of a process group
that moves no data, and takes a forward and a backward pass of a micro-batch with fake tensors: they
have shapes and types, and no numbers. So a plan is right for a system of which it knows nothing.
Only what depends on numbers is given: loads are balanced, and the mean number of experts of a token
is an argument.

    parts = measure(config, vocabulary, mean_choices)
    parts.layers[True].kept        # bytes that an MoE layer keeps of a micro-batch

A layer is the same in every layout that divides it in the same way, so one measurement serves all
numbers of data-parallel ranks, of pipeline stages and of layers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moe_parallel.config import Config, ParallelConfig
from moe_parallel.layers import ExpertLayer
from moe_parallel.model import attention
from moe_parallel.model.forward import share_of
from moe_parallel.model.gpt import build_chunks
from moe_parallel.model.parameters import NamedDevicesAreMeta, without_random_states
from moe_parallel.ops import select_backend
from moe_parallel.ops.types import RowMap
from moe_parallel.parallel import destroy_groups, initialize_groups, seed_ranks
from moe_parallel.platform import device
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from moe_parallel.telemetry.statistics import RoutingStatistics

#: Megatron-Core sums the gradients of these norms over tp.
_HEAD_NORMS = ("q_layernorm", "k_layernorm")
#: The kinds of operators that a plan times by shares of their own; all others move memory.
LINEAR, FP32, EXPERTS, ATTENTION, OTHER = "linear", "fp32", "experts", "attention", "other"
#: They write nothing.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Weight:
    """A weight as one rank holds it."""

    name: str
    size: int  # in numbers
    expert: bool  # divided over ep and etp
    over_tp: bool  # its gradient is summed over tp at the end of a step
    table: bool = False  # of the vocabulary, of which tied embeddings have two uses
    #: Those that Muon orthogonalizes: their number, 0 if it does not, rows and columns.
    matrices: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Message:
    """What a rank gives to one collective of torch.distributed."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, broadcast
    size: int  # bytes; of an all-to-all without what stays
    ranks: int  # of the group; 0: all that route in the layer, whatever their number
    stride: int


@dataclass
class Part:
    """A part of a model, on one rank and for one micro-batch."""

    weights: list[Weight] = field(default_factory=list)
    state: int = 0  # bytes of numbers that are not weights and remain from step to step
    largest: int = 0  # bytes of the results of the operator with the largest ones
    kept: int = 0  # bytes that the forward pass keeps for the backward pass
    messages: Counter[Message] = field(default_factory=Counter)  # of both passes
    after_step: Counter[Message] = field(default_factory=Counter)
    #: (kind, FLOPs, bytes read and written) of each operator.
    forward: list[tuple[str, float, int]] = field(default_factory=list)
    backward: list[tuple[str, float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Parts:
    """The parts of which every stage of a model is made."""

    embedding: Part
    shared: int  # bytes that a chunk keeps once for all its layers and micro-batches
    layers: dict[bool, Part]  # by whether it has experts
    head: Part


def measure(config: Config, vocabulary: int, mean_choices: float | None) -> Parts:
    """Count the parts of a model, as one rank of its layout has them.

    Args:
        config: a valid configuration that is `plannable` (search.py).
        vocabulary: of the model, padded.
        mean_choices: the mean number of experts of a token; None: K.
    """
    kinds = sorted(set(config.moe_layers))
    training, given = config.training, config.parallel
    pattern = "+".join(f"[{int(is_moe)}]*2" for is_moe in kinds)
    small = Config(
        model=replace(config.model, num_layers=2 * len(kinds)),
        moe=replace(config.moe, moe_layer_freq=pattern),
        selection=config.selection,
        parallel=ParallelConfig(
            tensor_model_parallel_size=given.tensor_model_parallel_size,
            context_parallel_size=given.context_parallel_size,
            sequence_parallel=given.sequence_parallel,
            expert_model_parallel_size=given.expert_model_parallel_size,
            expert_tensor_parallel_size=given.expert_tensor_parallel_size,
            moe_dispatch_parts=given.moe_dispatch_parts,
        ),
        # A GPU's chunks of the loss, and the rest of what a step is made of does not matter.
        training=replace(
            training,
            global_batch_size=training.micro_batch_size,
            loss_chunk_size=training.tokens_of_loss_chunk("cuda"),
        ),
    )
    return _measured(small, vocabulary, mean_choices)


@functools.lru_cache(maxsize=4096)
def _measured(config: Config, vocabulary: int, mean_choices: float | None) -> Parts:
    parallel = config.parallel
    of_tokens = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    of_experts = parallel.expert_model_parallel_size * parallel.expert_tensor_size
    # Twice what is needed, so that no data-parallel group is of one.
    with _fake_world(2 * math.lcm(of_tokens, of_experts)):
        counted = _count(config, vocabulary, mean_choices)
    kinds = sorted(set(config.moe_layers))
    layers = {is_moe: counted["layer", 2 * place + 1] for place, is_moe in enumerate(kinds)}
    shared = counted["layer", 0].kept - layers[kinds[0]].kept
    return Parts(counted["embedding", 0], shared, layers, counted["head", 0])


@contextlib.contextmanager
def _fake_world(ranks: int) -> Iterator[None]:
    """This process is rank 0 of a default group whose messages move nothing."""
    new_group = dist.new_group
    assert not dist.is_initialized(), "a plan needs a process without torch.distributed"
    adapt_megatron_to_cpu()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # Megatron-Core makes some groups with gloo, which needs all ranks.
        with mock.patch.object(
            dist, "new_group", lambda *a, **named: new_group(*a, **(named | {"backend": "fake"}))
        ):
            yield
    finally:
        destroy_groups()
        dist.destroy_process_group()


def mean_visits(num_experts: int, destinations: int, choices: float) -> float:
    """To how many of the destinations, which divide the experts, a token with so many different
    experts goes on average, if all sets of experts are equally likely."""

    def missed(k: int) -> float:
        """The probability that none of k experts is at one destination."""
        there = num_experts // destinations
        left = num_experts - there
        return math.comb(left, k) / math.comb(num_experts, k)

    below = min(math.floor(choices), num_experts)
    part = choices - below
    chance = (1 - part) * missed(below) + (part * missed(below + 1) if part else 0.0)
    return destinations * (1 - chance)


def _expected_sizes(
    num_experts: int, choices: float, shards: int
) -> Callable[[Tensor, int, int | None], list[Any]]:
    """`read_sizes` of balanced loads: as much to and from each destination."""

    def sizes(sizes_2DC: Tensor, tokens: int, padded: int | None) -> list[Any]:
        destinations = sizes_2DC.shape[1]
        visits = mean_visits(num_experts, destinations // shards, choices)
        rows = round(tokens * visits) * shards if padded is None else destinations * padded
        counts = rows, round(tokens * choices) * shards

        def here(place: int) -> list[int]:
            return [all_ // destinations + (place < all_ % destinations) for all_ in counts]

        return [[here(place) for place in range(destinations)]] * 2

    return sizes


def _count(
    config: Config, vocabulary: int, mean_choices: float | None
) -> dict[tuple[str, int], Part]:
    """By part: what a forward and a backward pass of a micro-batch count. Layers from 0."""
    groups = initialize_groups(config.parallel)
    seed_ranks(config.training.seed, groups)
    ops = select_backend("native")
    if config.moe.num_experts is not None and not config.selection.merges:
        choices = mean_choices or config.selection.mean_choices or config.num_experts
        shards = config.parallel.expert_tensor_size
        ops = replace(ops, read_sizes=_expected_sizes(config.num_experts, choices, shards))
    size = config.model.num_layers, config.moe.num_experts or 1
    statistics = RoutingStatistics(*size, torch.device("meta"))
    with NamedDevicesAreMeta(), torch.device("meta"):
        built: list[Any] = build_chunks(config, vocabulary, groups, statistics, ops=ops)
    (gpt,) = built
    chunk = Float16Module(get_model_config(gpt), gpt) if config.training.bf16 else gpt
    sequences, length = config.training.micro_batch_size, config.training.seq_length
    with _without_numbers() as fake, fake:
        _give_fake_weights(chunk)
        statistics.training = RoutingStatistics(*size, torch.device("cpu")).training
        tokens_BS = torch.zeros(sequences, length, dtype=torch.int64)
        batch = {"tokens": tokens_BS, "labels": tokens_BS, "loss_mask": torch.ones(tokens_BS.shape)}
        mine = share_of(batch, groups.cp)
        counts = _Counts(gpt, groups.tp_dp_cp, mean_choices)
        chunk.train()
        with counts.counting():
            losses_BS = chunk(
                mine["tokens"], None, None, labels=mine["labels"], loss_mask=mine["loss_mask"]
            )
            counts.end_forward()
            losses_BS.sum().backward()
            counts.end_backward()
            for layer in gpt.modules():
                if isinstance(layer, ExpertLayer):
                    counts.at = "layer", layer.layer_number - 1
                    layer.after_step()
    return counts.parts


@contextlib.contextmanager
def _without_numbers() -> Iterator[FakeTensorMode]:
    """Fake tensors, and without the few places where the program reads numbers or random states."""
    with (
        without_random_states(),
        # It is made in the first backward pass, and stays.
        mock.patch.object(MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
        mock.patch.object(torch, "allclose", lambda *_, **named: True),
        # As on a GPU: a CPU without instructions for bf16 would keep copies in fp32.
        mock.patch.object(device, "multiplies_bf16", lambda x: True),
    ):
        yield FakeTensorMode(allow_non_fake_inputs=True)


def _give_fake_weights(module: torch.nn.Module) -> None:
    """Weights and buffers of the same shapes, and attributes, which fake tensors can compute with.

    Inside a FakeTensorMode.
    """
    weights: dict[Tensor, torch.nn.Parameter] = {}
    for each in module.modules():
        for name, meta in each._parameters.items():
            if meta is not None and meta not in weights:
                weights[meta] = torch.nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype))
                weights[meta].__dict__.update(meta.__dict__)
            each._parameters[name] = None if meta is None else weights[meta]
        others = (each._buffers, each.__dict__)  # Megatron-Core's angles are no buffer
        for held in others:
            for name, meta in list(held.items()):
                if isinstance(meta, Tensor):
                    held[name] = torch.empty(meta.shape, dtype=meta.dtype)


def _matrices(weight: Any, megatron: Any) -> tuple[int, int, int]:
    """The number, rows and columns of the matrices that Muon takes, gathered from their parts."""
    if weight.ndim < 2:
        return 0, 0, 0
    shape, axis = list(weight.shape), getattr(weight, "partition_dim", -1)
    if axis >= 0:
        stacked = weight.ndim > 2
        shape[axis] *= (
            megatron.expert_tensor_parallel_size if stacked else megatron.tensor_model_parallel_size
        )
    count, rows, *columns = shape if len(shape) > 2 else (1, *shape)
    return count, rows, math.prod(columns)


class _Saved:
    """A tensor in autograd's graph; it goes with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # otherwise the graph would hold itself


class _Counts(TorchDispatchMode):
    """Counts what operators do, by the part of the model that is under way: `at`."""

    def __init__(self, gpt: Any, stage: dist.ProcessGroup, mean_choices: float | None) -> None:
        super().__init__()
        self._mean_choices = mean_choices
        self.parts: defaultdict[tuple[str, int], Part] = defaultdict(Part)
        self.at = ("embedding", 0)
        self._stage_ranks = stage.size()
        self._backward = self._after = False
        self._masks: dict[Any, Tensor] = {}
        self._length = gpt.max_sequence_length
        self._held = {id_of(each) for each in (*gpt.parameters(), *gpt.buffers())}
        self._saved: weakref.WeakKeyDictionary[_Saved, tuple[str, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._enter(gpt.embedding, ("embedding", 0))
        for number, layer in enumerate(gpt.decoder.layers):
            self._enter(layer, ("layer", number))
        self._enter(gpt.decoder.final_layernorm, ("head", 0))
        for name, weight in gpt.named_parameters():
            self.parts[_part_of(name)].weights.append(
                Weight(
                    name,
                    weight.numel(),
                    not getattr(weight, "allreduce", True),
                    getattr(weight, "sequence_parallel", False)
                    or (gpt.config.qk_layernorm and name.split(".")[-2] in _HEAD_NORMS),
                    table := "embedding.word" in name or "output_layer" in name,
                    (0, 0, 0) if table else _matrices(weight, gpt.config),
                )
            )
        for name, buffer in gpt.named_buffers():
            self.parts[_part_of(name)].state += nbytes_of(buffer)

    def _enter(self, module: torch.nn.Module, part: tuple[str, int]) -> None:
        """Counts for `part` from the begin of a forward pass of the module on, and in its backward
        pass, which begins with the gradient of its output."""

        def begin(*_: Any) -> None:
            self.at = part

        def end(module: Any, given: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            if y.requires_grad:
                y.register_hook(begin)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        gathered = "moe_parallel.layers.autonomous.saved_tensors_hooks"
        hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        strip = mock.patch.object(attention, "_strip", self._strip)
        # A GPU has one kernel for all queries of a run, where a CPU has one for each strip.
        run = mock.patch.object(attention, "STRIP", self._length)
        with self, hooks, strip, run, mock.patch(gathered, self._within):
            yield

    def _strip(self, keys: int, dtype: torch.dtype) -> Tensor:
        """A mask that a CPU's attention has in common in all layers, and a GPU's does not have."""
        if (keys, dtype) not in self._masks:
            mask = torch.empty(attention.STRIP, keys, dtype=dtype)
            self._held.add(id_of(mask))
            self._masks[keys, dtype] = mask  # so that no other storage gets its address
        return self._masks[keys, dtype]

    def end_forward(self) -> None:
        """Adds up the storages that the graph keeps, each for the part that saved it first."""
        seen = set(self._held)
        for saved, part in list(self._saved.items()):
            if id_of(saved.tensor) not in seen:
                seen.add(id_of(saved.tensor))
                self.parts[part].kept += saved.tensor.untyped_storage().nbytes()
        self._backward, self.at = True, ("head", 0)

    def end_backward(self) -> None:
        self._after = True

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved[saved] = self.at
        return saved

    def _within(self, pack: Any, unpack: Any) -> saved_tensors_hooks:
        """Hooks of the program, which torch calls instead of those around them."""

        def pack_both(tensor: Tensor) -> Any:
            packed = pack(tensor)
            return self._pack(packed) if isinstance(packed, Tensor) else packed

        def unpack_both(packed: Any) -> Tensor:
            return unpack(packed.tensor if isinstance(packed, _Saved) else packed)

        return saved_tensors_hooks(pack_both, unpack_both)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.moe_parallel.routing_map.default:
            result: Any = self._balanced(*args)
        else:
            result = func(*args, **(kwargs or {}))
        part = self.parts[self.at]
        if func.namespace == "c10d":
            self._message(part, func._schema.name.removeprefix("c10d::"), args)
        elif func.namespace in ("aten", "moe_parallel") and not func.is_view:
            kind, flops = _work(func, args, kwargs or {}, result)
            made = sum(map(nbytes_of, _tensors(result)))
            # The mask is the only tensor that attention has by name.
            given = args if kind == ATTENTION else (args, kwargs)
            work = kind, flops, made + sum(map(nbytes_of, _tensors(given)))
            if not self._after:
                part.largest = max(part.largest, made)
                if func._schema.name.removeprefix("aten::") not in _ALLOCATIONS:
                    (part.backward if self._backward else part.forward).append(work)
        return result

    def _balanced(
        self,
        experts_TJ: Tensor,
        num_experts: int,
        pad: int | None,
        num_rows: int | None,
        max_rows: int | None,
    ) -> RowMap:
        """A row map with as many rows as tokens have experts on average."""
        tokens, slots = experts_TJ.shape
        if pad is not None:
            rows = num_experts * pad
        elif num_rows is not None or max_rows is not None:
            rows = num_rows or max_rows or 0
        elif self._mean_choices is not None:
            rows = min(tokens * slots, round(tokens * self._mean_choices))
        else:
            rows = tokens * slots
        new = experts_TJ.new_empty
        return RowMap(new(rows), new(experts_TJ.shape), new(num_experts))

    def _message(self, part: Part, name: str, args: Any) -> None:
        kind, place = _COLLECTIVES[name]
        if kind is None:
            return
        group = dist.ProcessGroup.unbox(
            next(each for each in args if isinstance(each, torch.ScriptObject))
        )
        ranks = dist.get_process_group_ranks(group)
        size = sum(map(nbytes_of, _tensors(args[place])))
        if kind == "all-to-all":
            rows = args[1]
            splits = args[4] or [len(rows) // len(ranks)] * len(ranks)
            size -= splits[group.rank()] * (nbytes_of(rows) // max(len(rows), 1))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        of_stage = self._after and len(ranks) == self._stage_ranks
        message = Message(kind, size, 0 if of_stage else len(ranks), stride)
        (part.after_step if self._after else part.messages)[message] += 1


def id_of(tensor: Tensor) -> int:
    """What tensors with the same storage have in common."""
    return tensor.untyped_storage()._cdata


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)


def _part_of(name: str) -> tuple[str, int]:
    """The part that a weight of Megatron-Core's GPTModel belongs to."""
    words = name.split(".")
    if words[0] == "embedding":
        return "embedding", 0
    return ("layer", int(words[2])) if words[:2] == ["decoder", "layers"] else ("head", 0)


#: The kind of a collective by the name of its operator, and which argument has what is sent.
_COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "allgather_": ("all-gather", 1),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "barrier": (None, 0),
}


def _work(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[str, float]:
    """The kind and the FLOPs of an operator."""
    name = func._schema.name.removeprefix("moe_parallel::")
    if name in _OURS:
        return _OURS[name](*args)
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return OTHER, 0.0
    kind = ATTENTION if "attention" in name else _dense(next(_tensors(args)))
    return kind, float(count(*args, **kwargs, out_val=result))


def _dense(x: Tensor) -> str:
    """The kind of a product with x."""
    return LINEAR if x.dtype == torch.bfloat16 else FP32


def _product(out: Tensor, x: Tensor, *_: Any) -> tuple[str, float]:
    return _dense(x), 2.0 * out.numel() * x.shape[-1]


def _attends(products: float, axis: int, q: Tensor, k: Tensor, *_: Any) -> tuple[str, float]:
    """Of the last tokens of a sequence to all before them. `axis`: of the tokens."""
    seen = k.shape[axis] - (q.shape[axis] - 1) / 2  # keys of a query, on average
    return ATTENTION, 2 * products * q.numel() * seen


def _of_norms(products: float, x: Tensor, w: Tensor) -> tuple[str, float]:
    return EXPERTS, 2 * products * len(x) * w.numel()


def _of_experts(products: float, *args: Any) -> tuple[str, float]:
    """Each row is multiplied with all matrices of its expert."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    slots, _, counts = (each for each in tensors if each.dtype == torch.int64)
    weights = [each for each in tensors if each.dim() >= 3 and len(each) == len(counts)]
    return EXPERTS, 2 * products * len(slots) * sum(each[0].numel() for each in weights)


def _autonomous_backward(*args: Any) -> tuple[str, float]:
    """C W_up is computed again unless it was kept as g."""
    kind, flops = _of_experts(2, *args)
    slots, w_up, g = args[3], args[7], args[14]
    return kind, flops + (0 if len(g) else 2.0 * len(slots) * w_up[0].numel())


_OURS: dict[str, Callable[..., tuple[str, float]]] = {
    "product": _product,
    "attention": partial(_attends, 2, 0),
    # Backward: the scores again, and the gradients of both products.
    "attention_backward": lambda dy, q, k, *_: _attends(5, 0, q, k),
    "aten::_scaled_dot_product_flash_attention_for_cpu": partial(_attends, 2, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda dy, q, k, *_: _attends(
        5, 2, q, k
    ),
    "expert_merge": lambda weights, w: (EXPERTS, 2.0 * len(weights) * w.numel()),
    "expert_merge_backward": lambda dy, weights, w: (EXPERTS, 4.0 * len(weights) * w.numel()),
    "grouped_outer": lambda x, y, counts: (EXPERTS, 2.0 * x.numel() * y.shape[1]),
    "grouped_outer_add": lambda total, x, y, counts: (EXPERTS, 2.0 * x.numel() * y.shape[1]),
    "norm_topk": lambda x, w, *_: _of_norms(1, x, w),
    # Backward: C again, unless it was kept, and the gradients of x and w.
    "norm_topk_backward": lambda dnorms, dc, x, w, norms, experts, c: _of_norms(
        3 if c is None else 2, x, w
    ),
    "norm_topk_chosen_backward": lambda dnorms, dc, x, w, norms, experts, c, slots, *_: (
        EXPERTS,
        2.0 * (3 if c is None else 2) * len(slots) * w[0].numel(),
    ),
    "grouped_gemm": lambda x, w, counts: (EXPERTS, 2.0 * len(x) * w[0].numel()),
    "routed_experts": partial(_of_experts, 1),
    "routed_experts_backward": partial(_of_experts, 2),
    "autonomous_experts": partial(_of_experts, 1),
    "autonomous_experts_backward": _autonomous_backward,
}
