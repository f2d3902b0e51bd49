"""Count what the program really keeps and sends: tensors saved for the backward pass, messages.

A message is what a rank gives to one collective operation of torch.distributed, seen below all
wrappers, as torch's dispatcher sees it.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

#: The kind of a collective by the name of its operator, and which argument has what is sent.
KINDS = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("send", 0),
    "allgather_": ("all-gather", 1),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "recv_": (None, 0),
    "barrier": (None, 0),
}

Message = tuple[str, tuple[int, ...], int]  # kind, ranks of the group, bytes


class Messages(TorchDispatchMode):
    """Counts the messages that this rank sends while the mode is on.

    With an all-to-all, what stays on the rank is not counted.
    """

    def __init__(self, echo: bool = False) -> None:
        """`echo`: an all-to-all of equal parts returns what was sent, under a fake group."""
        super().__init__()
        self.counted: Counter[Message] = Counter()
        self.to_rank: Counter[int] = Counter()  # bytes of all-to-alls and sends, by receiver
        self.echo = echo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        kind, place = KINDS[name]
        if kind is None:
            return
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        sent = args[place]
        if isinstance(sent, torch.Tensor):
            sent = [sent]
        size = sum(t.numel() * t.element_size() for t in sent)
        if kind == "all-to-all":
            output, x = args[0], args[1]
            splits = args[4] or [len(x) // group.size()] * group.size()
            row = x[:1].numel() * x.element_size()
            size -= splits[group.rank()] * row
            for receiver, rows in zip(ranks, splits, strict=True):
                self.to_rank[receiver] += rows * row
            if self.echo:
                output.copy_(x)
        if kind == "send":
            self.to_rank[ranks[args[2]]] += size
        self.counted[kind, ranks, size] += 1


class _Saved:
    """A tensor in autograd's graph; it goes with the graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # otherwise the graph would hold itself


class Kept:
    """The storages that autograd keeps, each counted once, however many tensors share it."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        """`others`: weights and buffers, which do not count."""
        self._others = {t.untyped_storage().data_ptr() for t in others}
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    @contextmanager
    def counting(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def within(self, pack: Any, unpack: Any) -> saved_tensors_hooks:
        """Hooks of the program, which torch calls instead of those around them."""

        def pack_both(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            return self._pack(packed) if isinstance(packed, torch.Tensor) else packed

        def unpack_both(packed: Any) -> torch.Tensor:
            return unpack(packed.tensor if isinstance(packed, _Saved) else packed)

        return saved_tensors_hooks(pack_both, unpack_both)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved

    def sizes(self) -> list[tuple[tuple[int, ...], str, int]]:
        """(shape and dtype of one tensor, bytes of the storage) of what is kept now."""
        found = {}
        for saved in self._saved:
            storage = saved.tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._others:
                shape, dtype = tuple(saved.tensor.shape), str(saved.tensor.dtype)[6:]
                found.setdefault(storage.data_ptr(), (shape, dtype, storage.nbytes()))
        return sorted(found.values())

    @property
    def nbytes(self) -> int:
        return sum(size for _, _, size in self.sizes())
