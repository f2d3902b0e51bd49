"""All adaptations of Megatron-Core that a host without CUDA needs, and their reasons.

Megatron-Core is written for GPUs: it asks `torch.cuda` for the current device, keeps its random
states there, and spells `device="cuda"` and `"torch.cuda.FloatTensor"` as literals. Its arithmetic
and its process groups run unchanged on a CPU over gloo. `ADAPTATIONS` lists the changes, and
`adapt_megatron_to_cpu` applies that list. It also replaces loops that are slow on every host
(`gradient_loops`).

Each entry is as narrow as Megatron-Core allows:

- `Replace` gives one name another value. Under `torch.cuda` this removes no function that works:
  without CUDA those functions can only raise.
- `Literals` rewrites the device literals in the compiled functions of one Megatron module. No
  torch function is wrapped, so operations cost the same as before.
- `Hush` drops one log message that is false on a CPU host.

All three change objects that Megatron-Core looks up at the time of the call, so it makes no
difference which of its modules were imported before.

Not covered, because this project does not use it: fp16 loss scaling, CUDA graphs, FSDP, inference,
and expert tensor parallelism in the stock MoE dispatcher, which gathers uneven shares; gloo cannot.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from packaging.version import Version

from moe_parallel.platform.clipping import l2_norm_by_rows
from moe_parallel.platform.megatron_version import check_megatron_version
from moe_parallel.selection.tokens import positions, zigzag

CPU = torch.device("cpu")
_RANDOM = "megatron.core.tensor_parallel.random"

#: The replacements of the literals of a CUDA device on a CPU host.
CPU_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class HostStream:
    """Replaces torch.cuda.Stream: work on a host is already in order."""

    def wait_stream(self, stream: "HostStream") -> None:
        """Nothing to wait for."""

    def record_event(self) -> "HostEvent":
        return HostEvent()


class HostEvent:
    """Replaces torch.cuda.Event: recorded work is already done."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _counts_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Converts the dispatcher's counts and splits as upstream does for CUDA tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _checkpoint_without_fp8() -> Any:
    """Replaces a class, whose default for `fp8` means that there is one."""
    return importlib.import_module(_RANDOM).CheckpointWithoutOutput(fp8=None)


def _rotary_angles_of_share(angles: torch.Tensor, axis: int, cp_group: Any) -> torch.Tensor:
    """The angles of a context-parallel rank's tokens, as upstream selects them on a GPU."""
    share = zigzag(angles.shape[axis], cp_group.size(), cp_group.rank())
    return angles.index_select(axis, positions(share))


@dataclass(frozen=True)
class Replace:
    """Gives the attribute at the dotted path `target` the value `replacement`."""

    target: str
    replacement: Any
    reason: str
    before: str | None = None

    def apply(self) -> None:
        owner, name = self.target.rsplit(".", 1)
        setattr(_resolve(owner), name, self.replacement)


@dataclass(frozen=True)
class Literals:
    """Rewrites `CPU_LITERALS` in every function of the module `target`."""

    target: str
    reason: str
    before: str | None = None

    def apply(self) -> None:
        for function in functions_of(importlib.import_module(self.target)):
            code = function.__code__
            if literals_in(code):
                function.__code__ = _rewrite(code)


@dataclass(frozen=True)
class Hush:
    """Drops the log records of the logger `target` whose message is `message`."""

    target: str
    message: str
    reason: str
    before: str | None = None

    def apply(self) -> None:
        logging.getLogger(self.target).addFilter(lambda record: record.msg != self.message)


Adaptation = Replace | Literals | Hush

ADAPTATIONS: tuple[Adaptation, ...] = (
    Replace(
        "torch.cuda.current_device",
        lambda: CPU,
        "every buffer, parameter and message is created on the current CUDA device",
    ),
    Replace(
        "torch.cuda.synchronize",
        lambda device=None: None,
        "timers, pipeline messages and checkpoint writers wait for the device",
    ),
    Replace(
        "torch.cuda.current_stream",
        lambda device=None: HostStream(),
        "gradient reduction (from 0.17) and the stock MoE dispatcher ask for the stream",
    ),
    Replace(
        "torch.cuda.Stream",
        HostStream,
        "the stock MoE dispatcher copies its token counts to the host on a side stream",
    ),
    Replace(
        "torch.cuda.manual_seed",
        torch.manual_seed,
        "the tensor-, expert- and data-parallel seeds are set in the CUDA generator",
    ),
    Replace(
        "torch.cuda.get_rng_state",
        lambda device=None: torch.get_rng_state(),
        "random states are added to the model-parallel tracker, and kept by the rerun machine",
    ),
    Replace(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state",
        lambda device=None, clone=False, graph_safe=False: torch.get_rng_state(),
        "dropout and recomputation fork the random state; on a CPU host it is torch's own",
    ),
    Replace(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        lambda state, device=None, graph_safe=False: torch.set_rng_state(state),
        "as above; upstream defers it until CUDA starts, which never happens here",
    ),
    Hush(
        "megatron.core.tensor_parallel.random",
        "CPU RNG state changed within GPU RNG context",
        "the forked generator is the CPU's, so that its state moves is the point",
    ),
    Replace(
        "torch.Tensor.cuda",
        lambda self, *args, **kwargs: self,
        "tied embeddings, the optimizer's state and exchanged checkpoint shards move themselves",
    ),
    Replace(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        _counts_to_numpy,
        "the stock MoE dispatcher turns its splits into numpy integers for CUDA tensors only",
    ),
    Replace(
        "megatron.core.transformer.moe.moe_utils.te_general_gemm",
        None,
        "the stock router reads this name, left undefined without Transformer Engine",
        before="0.17",
    ),
    Replace(
        "megatron.core.tensor_parallel.CheckpointWithoutOutput",
        _checkpoint_without_fp8,
        "a norm whose output is recomputed asks for Transformer Engine's FP8 state",
    ),
    Replace(
        "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank",
        _rotary_angles_of_share,
        "with context parallelism, the places of a rank's chunks are put into pinned memory",
    ),
    Literals(
        "megatron.core.pipeline_parallel.schedules",
        "the token count of every schedule is a CUDA tensor",
    ),
    Literals(
        "megatron.core.optimizer.optimizer",
        "loss scale and overflow flag are CUDA tensors, and bf16 parameters are told by type name",
    ),
    Literals(
        "megatron.core.optimizer.distrib_optimizer",
        "parameters are told by their CUDA type names",
    ),
    Literals(
        "megatron.core.optimizer.clip_grads",
        "the gradient norm is a CUDA tensor, and gradients are checked by CUDA type name",
    ),
    Replace(
        "megatron.core.optimizer.clip_grads.l2_norm_impl",
        l2_norm_by_rows,
        "the norm used where Apex and Transformer Engine are absent is a CUDA tensor and inexact",
    ),
    Literals(
        "megatron.core.transformer.utils",
        "the causal mask is a CUDA tensor",
    ),
    Literals(
        "megatron.core.rerun_state_machine",
        "the verdict on a NaN or a spike is exchanged in CUDA tensors",
    ),
    Literals(
        "megatron.core.dist_checkpointing.exchange_utils",
        "shards read by one rank for the others are received in CUDA tensors",
    ),
)


def adaptations_for(version: str) -> tuple[Adaptation, ...]:
    """The entries of `ADAPTATIONS` that megatron-core `version` needs."""
    return tuple(
        entry
        for entry in ADAPTATIONS
        if entry.before is None or Version(version) < Version(entry.before)
    )


def adapt_megatron_to_cpu() -> None:
    """Makes Megatron-Core run on this host's CPU; a second call does nothing.

    Call it before process groups are created; it makes no difference which Megatron modules are
    imported by then. Every process must call it.

    Raises:
        RuntimeError: CUDA is available, so Megatron-Core must stay unchanged.
        InputError: megatron-core is missing, or its version is not a supported one.
    """
    if torch.cuda.is_available():
        raise RuntimeError("Megatron-Core is adapted to CPU hosts only, and CUDA is available here")
    _apply(check_megatron_version())


@functools.cache
def _apply(version: str) -> None:
    for entry in adaptations_for(version):
        entry.apply()
    from moe_parallel.platform.gradient_loops import replace_gradient_loops  # imports Megatron-Core

    replace_gradient_loops()


def describe(version: str) -> list[str]:
    """One line per adaptation that megatron-core `version` needs: what, how and why."""
    return [
        f"{entry.target} ({type(entry).__name__.lower()}): {entry.reason}"
        for entry in adaptations_for(version)
    ]


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that `module` defines, without their decorators."""
    members: list[Any] = list(vars(module).values())
    members += [m for c in members if inspect.isclass(c) for m in vars(c).values()]
    for member in members:
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            yield function


def literals_in(constant: Any) -> set[str]:
    """The keys of `CPU_LITERALS` in a code object, its tuples and its inner functions."""
    if isinstance(constant, CodeType):
        return literals_in(constant.co_consts)
    if isinstance(constant, tuple):
        return set().union(*map(literals_in, constant))
    return {constant} if isinstance(constant, str) and constant in CPU_LITERALS else set()


def _rewrite(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(map(_rewrite, constant.co_consts)))
    if isinstance(constant, tuple):
        return tuple(map(_rewrite, constant))
    return CPU_LITERALS.get(constant, constant) if isinstance(constant, str) else constant


def _resolve(path: str) -> Any:
    """The module or class at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, name = path.rsplit(".", 1)
        return getattr(_resolve(owner), name)
