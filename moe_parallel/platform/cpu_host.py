"""What Megatron-Core needs on a host without CUDA.

Megatron-Core is written for GPUs: it asks `torch.cuda` for the current device, keeps its random
states there, and spells `device="cuda"` and `"torch.cuda.FloatTensor"` as literals. Its arithmetic
and its process groups run unchanged on a CPU over gloo. `adapt_megatron_to_cpu` replaces attributes
(`REPLACED`), and literals in compiled functions (`REWRITTEN`) where there is nothing to replace: no
torch function is wrapped, so operations cost the same as before. Megatron-Core looks all of these
up at the time of the call, so it makes no difference which of its modules were imported before. It
also replaces loops that are slow on every host (`gradients`).

Not covered, because this project does not use it: fp16 loss scaling, CUDA graphs, FSDP, inference,
the rerun state machine, its saving of checkpoints, and the stock MoE dispatcher on several ranks.
"""

import functools
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from moe_parallel.platform.gradients import l2_norm_by_rows
from moe_parallel.platform.megatron import check_megatron_version
from moe_parallel.selection.tokens import positions, zigzag

CPU = torch.device("cpu")
_CORE = "megatron.core"
_RANDOM = f"{_CORE}.tensor_parallel.random"

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


def _checkpoint_without_fp8() -> Any:
    """Replaces a class, whose default for `fp8` means that there is one."""
    return importlib.import_module(_RANDOM).CheckpointWithoutOutput(fp8=None)


def _rotary_angles_of_share(angles: torch.Tensor, axis: int, cp_group: Any) -> torch.Tensor:
    """The angles of a context-parallel rank's tokens, as upstream selects them on a GPU."""
    share = zigzag(angles.shape[axis], cp_group.size(), cp_group.rank())
    return angles.index_select(axis, positions(share))


#: Attributes of torch and Megatron-Core, by dotted path, and their values on a CPU host. Under
#: `torch.cuda` this removes no function that works: without CUDA those can only raise.
REPLACED: dict[str, Any] = {
    # Every buffer, parameter and message is created on the current CUDA device.
    "torch.cuda.current_device": lambda: CPU,
    # Timers, pipeline messages and checkpoint writers wait for the device.
    "torch.cuda.synchronize": lambda device=None: None,
    # Gradient reduction (from 0.17) and the stock MoE dispatcher ask for the stream.
    "torch.cuda.current_stream": lambda device=None: HostStream(),
    # The stock MoE dispatcher copies its token counts to the host on a side stream.
    "torch.cuda.Stream": HostStream,
    # The tensor-, expert- and data-parallel seeds are set in the CUDA generator.
    "torch.cuda.manual_seed": torch.manual_seed,
    # Random states are added to the model-parallel tracker.
    "torch.cuda.get_rng_state": lambda device=None: torch.get_rng_state(),
    # Dropout and recomputation fork the random state; on a CPU host it is torch's own.
    f"{_RANDOM}._get_cuda_rng_state": (
        lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    ),
    # As above; upstream defers it until CUDA starts, which never happens here.
    f"{_RANDOM}._set_cuda_rng_state": (
        lambda state, device=None, graph_safe=False: torch.set_rng_state(state)
    ),
    # Tied embeddings, the optimizer's state and exchanged checkpoint shards move themselves.
    "torch.Tensor.cuda": lambda self, *args, **kwargs: self,
    # The stock router reads this name, which 0.16 leaves undefined without Transformer Engine.
    f"{_CORE}.transformer.moe.moe_utils.te_general_gemm": None,
    # A norm whose output is recomputed asks for Transformer Engine's FP8 state.
    f"{_CORE}.tensor_parallel.CheckpointWithoutOutput": _checkpoint_without_fp8,
    # With context parallelism, the places of a rank's chunks are put into pinned memory.
    f"{_CORE}.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank": (
        _rotary_angles_of_share
    ),
    # The norm used where Apex and Transformer Engine are absent is a CUDA tensor and inexact.
    f"{_CORE}.optimizer.clip_grads.l2_norm_impl": l2_norm_by_rows,
}

#: Modules with `CPU_LITERALS` in the code of functions, which no argument or attribute reaches.
REWRITTEN = (
    f"{_CORE}.pipeline_parallel.schedules",  # the token count of every schedule
    f"{_CORE}.optimizer.optimizer",  # loss scale and overflow flag; bf16 weights, told by type name
    f"{_CORE}.optimizer.distrib_optimizer",  # weights, told by type name
    f"{_CORE}.optimizer.clip_grads",  # the gradient norm; gradients, checked by type name
    f"{_CORE}.transformer.utils",  # the causal mask
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
    _adapt(check_megatron_version())


@functools.cache
def _adapt(version: str) -> None:
    for target in (*REPLACED, *REWRITTEN):
        adapt(target)
    from moe_parallel.platform.gradients import replace_gradient_loops  # imports Megatron-Core

    replace_gradient_loops()


def adapt(target: str) -> None:
    """Make one entry of `REPLACED` or `REWRITTEN` effective."""
    if target in REPLACED:
        owner, name = target.rsplit(".", 1)
        setattr(_resolve(owner), name, REPLACED[target])
        return
    for function in functions_of(importlib.import_module(target)):
        code = function.__code__
        if literals_in(code):
            function.__code__ = _rewrite(code)


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
