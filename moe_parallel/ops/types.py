"""The types of the operators: signatures, and the arguments and results beside tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor


class RowMap(NamedTuple):
    """The two directions of one dispatch. A row is one token as one expert sees it.

    Rows are sorted by expert, then by token, then by choice. The N rows may include padding (with a
    capacity, or for a fixed N) and may lack choices (those given as -1, or beyond a fixed N).

    slots_N: int64, the flat slot `t * K + k` that fills row n; -1 for a padding row.
    rows_TK: int64, the row of choice k of token t; -1 if the choice is not dispatched.
    counts_E: int64, the rows per expert, including a capacity's padding. They sum to N, or to less
        for a fixed N: no expert computes the rows after the last one's.
    """

    slots_N: Tensor
    rows_TK: Tensor
    counts_E: Tensor


class NormScores(NamedTuple):
    """The norms of all experts for each token, and the chosen experts.

    norms_TE: fp32 (fp64 for fp64 inputs), differentiable.
    experts_TK: int64, the chosen experts: by norm plus bias, largest first, or in the order that
        `chosen` returns.
    c_TKR: C = x W_down of the chosen experts, differentiable. None: nothing was kept.
    """

    norms_TE: Tensor
    experts_TK: Tensor
    c_TKR: Tensor | None = None


#: How much of C = x W_down `norm_topk` keeps: nothing, C of the chosen experts, or C of all.
Keep = Literal["nothing", "chosen", "all"]

#: The norms of `norm_topk` through which a gradient flows: all, or those of the chosen experts.
Gradient = Literal["all", "chosen"]

#: norms_TE -> experts_TK, int64; -1 is an empty slot.
Choose = Callable[[Tensor], Tensor]


#: The arguments of `read_sizes` -> the sizes as lists.
ReadSizes = Callable[[Tensor, int, int | None], list[Any]]


def read_sizes(sizes_2DC: Tensor, tokens: int, padded: int | None) -> list[Any]:
    """The host waits for the device here, and nowhere else in a layer: messages need sizes.

    sizes_2DC: the rows to each of D destinations and the choices in them, and those from there.
    tokens, padded: of this rank, and the rows to each destination if they are padded. A plan, whose
        tensors have no numbers, takes the sizes from these.
    """
    numbers: list[Any] = sizes_2DC.tolist()
    return numbers


class RoutingMap(Protocol):
    def __call__(
        self,
        experts_TK: Tensor,
        num_experts: int,
        pad_rows_per_expert: int | None = None,
        num_rows: int | None = None,
        max_rows: int | None = None,
    ) -> RowMap: ...


class Unpermute(Protocol):
    def __call__(self, y_ND: Tensor, row_map: RowMap, probs_TK: Tensor | None = None) -> Tensor: ...


class PackRows(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        probs_TK: Tensor,
        numbers_TC: Tensor,
        row_map: RowMap,
        experts_there: int,
    ) -> Tensor: ...


class Swiglu(Protocol):
    def __call__(self, gate_NF: Tensor, up_NF: Tensor, probs_N: Tensor | None = None) -> Tensor: ...


class Multiply(Protocol):
    def __call__(
        self,
        a_NI: Tensor,
        b_IO: Tensor,
        out_NO: Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> Tensor: ...


class NormTopK(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        w_EDR: Tensor,
        k: int | None,
        bias_E: Tensor | None = None,
        *,
        keep: Keep = "nothing",
        gradient: Gradient = "all",
        chosen: Choose | None = None,
        max_rows: int | None = None,
    ) -> NormScores: ...


class RoutedExperts(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        probs_TK: Tensor,
        row_map: RowMap,
        w_gate_up_ED2F: Tensor,
        w_out_EFD: Tensor,
        *,
        main_gradients: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor: ...


class AutonomousExperts(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        probs_TK: Tensor,
        row_map: RowMap,
        w_down_EDR: Tensor,
        w_up_ERW: Tensor,
        w_p_EDW: Tensor,
        w_out_EWD: Tensor,
        *,
        c_TKR: Tensor | None = None,
        norms_TK: Tensor | None = None,
        recompute_gate: bool = True,
        main_gradients: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """The operators of one backend; `reference.py` specifies each of them."""

    name: str
    routing_map: RoutingMap
    permute: Callable[[Tensor, RowMap], Tensor]
    unpermute: Unpermute
    visits: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
    pack_rows: PackRows
    grouped_gemm: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Swiglu
    swiglu_halves: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    product: Multiply
    norm_topk: NormTopK
    expert_merge: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    split_and_rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    softmax_sums: Callable[[Tensor], tuple[Tensor, Tensor]]
    softmax_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    routed_experts: RoutedExperts
    autonomous_experts: AutonomousExperts
    read_sizes: ReadSizes = read_sizes
