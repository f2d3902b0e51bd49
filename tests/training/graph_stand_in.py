"""A stand-in for torch's CUDA graphs on a CPU: it records operators and runs them again.

As on a GPU, a recording has no effect: what its operators wrote to memory that existed before is
put back, and what would wait for a GPU is an error. A replay runs the operators on the same memory,
whatever Python has done in between. Random numbers are new in each replay.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

#: What returns a number to Python, or reads or sets the state of random numbers.
FORBIDDEN = {
    torch.Tensor: ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__"),
    torch: ("get_rng_state", "set_rng_state"),
    torch.cuda: ("get_rng_state", "set_rng_state"),
}

SIZED_BY_VALUES = (
    "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive", "equal",
)  # fmt: skip
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class Recorded:
    """In place of torch.cuda.CUDAGraph."""

    replays = recordings = 0  # of all graphs

    def __init__(self):
        self.operators = []

    def replay(self):
        Recorded.replays += 1
        with torch.no_grad():
            for func, args, kwargs, out in self.operators:
                found = _done(func, func(*args, **kwargs))
                for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                    if isinstance(old, torch.Tensor) and not _shares_memory(old, new):
                        old.copy_(new)


def _done(func, out):
    """The result of an operator; a message has arrived."""
    if func.name().startswith("c10d::"):
        tree_leaves(out)[-1].wait()
    return out


class _Recording(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        self.made = set()  # memory of the record's own
        self.before = {}  # what other memory had before the record wrote to it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_sized_by_values(func, args, kwargs):
            raise RuntimeError(f"{func.name()} is not possible during a recording")
        for x in _written(func, args, kwargs):
            self._keep(x)
        out = _done(func, func(*args, **kwargs))
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and _memory(x) not in given:
                self.made.add(_memory(x))
        held = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, out))
        self.graph.operators.append((func, *held))
        return out

    def _keep(self, x):
        if _memory(x) not in self.made and _memory(x) not in self.before:
            self.before[_memory(x)] = x.untyped_storage(), x.untyped_storage().clone()

    def undo(self):
        for storage, before in self.before.values():
            storage.copy_(before)


@contextmanager
def record(graph, **_):
    """In place of torch.cuda.graph."""
    with ExitStack() as patches:
        for owner, names in FORBIDDEN.items():
            for name in names:
                patches.enter_context(mock.patch.object(owner, name, _refusal(name)))
        # `_done` has waited. To wait again would copy once more what arrived during the recording.
        patches.enter_context(mock.patch.object(dist.Work, "wait", lambda *_: True))
        recording = patches.enter_context(_Recording(graph))
        Recorded.recordings += 1
        yield
    recording.undo()


def _refusal(name):
    def refused(*_, **__):
        raise RuntimeError(f"{name}() is not possible during a recording")

    return refused


def is_sized_by_values(func, args, kwargs):
    """Whether the size of an operator's result depends on values, for which the host waits."""
    name = name_of(func)
    if name in INDEXING:
        # A number, which is on the host, fills the places of a mask without a list of them. (A
        # tensor [] of the device would wait; it is not told apart.)
        is_filled = name != "index" and args[2].dim() == 0
        is_mask = any(index is not None and index.dtype == torch.bool for index in args[1])
        return is_mask and not is_filled
    if name == "repeat_interleave":
        return "repeats" in str(func._schema).split(",")[0] and kwargs.get("output_size") is None
    if name == "routing_map":
        return args[2:] == (None, None, None)  # padding, number of rows, most rows
    return name in SIZED_BY_VALUES


def name_of(func):
    return func.name().split("::")[1].split(".")[0]


@contextmanager
def stand_in():
    """Inside, a step graph records and replays on a CPU."""
    with ExitStack() as patches:
        for name, instead in (
            ("torch.cuda.CUDAGraph", Recorded),
            ("torch.cuda.graph", record),
            ("torch.cuda.current_stream", lambda: None),
            ("moe_parallel.training.engine.use_stream_of_graphs", lambda *_: None),
        ):
            patches.enter_context(mock.patch(name, instead))
        yield


def _memory(x):
    return x.untyped_storage()._cdata


def _shares_memory(x, y):
    return _memory(x) == _memory(y)


def _written(func, args, kwargs):
    """The tensors to which an operator writes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from (x for x in tree_leaves(given) if isinstance(x, torch.Tensor))
