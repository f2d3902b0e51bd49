"""The operators in plain torch: the specification with which every other backend is compared.

Shape suffixes: T tokens, D model width, E experts, K choices per token, S slots of all tokens
(T * K), N rows (dispatched choices), I and O the two widths of a matrix, F width of an expert, R
low-rank size (d_low), W wide size (d_wide), P merged experts.

All functions take CPU and CUDA tensors in fp32, bf16, fp16 or fp64. torch differentiates them. For
bf16 and fp16, sums are computed in fp32 (`accumulation_dtype`).
"""

from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from moe_parallel.ops.causal_attention import attention as attention
from moe_parallel.ops.packed_rows import pack_rows as pack_rows
from moe_parallel.ops.packed_rows import visits as visits
from moe_parallel.ops.rms_norm import rms_norm as rms_norm
from moe_parallel.ops.rotary import rotary as rotary
from moe_parallel.ops.rotary import split_and_rotate as split_and_rotate
from moe_parallel.ops.softmax import softmax_gradient as softmax_gradient
from moe_parallel.ops.softmax import softmax_sums as softmax_sums
from moe_parallel.ops.types import Choose, Gradient, Keep, NormScores, RowMap


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and norms: fp64 for fp64, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def routing_map(
    experts_TK: Tensor,
    num_experts: int,
    pad_rows_per_expert: int | None = None,
    num_rows: int | None = None,
    max_rows: int | None = None,
) -> RowMap:
    """Sort the choices by expert. The sort is stable: it keeps the order of tokens and choices.

    experts_TK: int64, the expert of each choice; -1 for an empty slot (not chosen, or dropped).
    pad_rows_per_expert: with a value C, every expert gets exactly C rows. The padding is at the end
        of the expert's rows.
    num_rows: the number of choices that are not -1, if the host knows it. With it, with
        pad_rows_per_expert or max_rows, the host does not wait for a count from the GPU.
    max_rows: without padding of experts, the map has exactly so many rows. Those after the last
        expert's are padding of no expert; choices beyond them are left out. With padding, those
        beyond the C rows of an expert are left out.

    Raises ValueError if an expert is num_experts or above, if without max_rows an expert has more
    than C choices, or if num_rows is wrong. On a GPU the native operators do not check this,
    because that would make the host wait; they leave such a choice out.
    """
    chosen_S = experts_TK.flatten()
    if chosen_S.numel() > 0 and int(chosen_S.max()) >= num_experts:
        raise ValueError(
            f"expert {int(chosen_S.max())} was chosen, but there are only {num_experts} experts"
        )
    chosen_E = torch.bincount(chosen_S[chosen_S >= 0], minlength=num_experts)
    if num_rows is not None and int(chosen_E.sum()) != num_rows:
        raise ValueError(
            f"num_rows is {num_rows}, but {int(chosen_E.sum())} choices name an expert"
        )
    if pad_rows_per_expert is None:
        counts_E = chosen_E
    else:
        counts_E = torch.full_like(chosen_E, pad_rows_per_expert)
        if max_rows is None and int((chosen_E - counts_E).max()) > 0:
            raise ValueError(
                f"an expert has {int(chosen_E.max())} choices, more than its {pad_rows_per_expert} "
                "rows: drop the overflow before routing_map"
            )

    all_rows = int(counts_E.sum())
    if max_rows is not None and pad_rows_per_expert is None:
        ends_E = chosen_E.cumsum(0).clamp(max=max_rows)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        all_rows = max_rows

    # Empty slots sort after all choices and are cut off.
    sort_key_S = chosen_S.where(chosen_S >= 0, num_experts)
    by_expert_S = sort_key_S.argsort(stable=True)[: int(chosen_E.sum())]

    # The i-th choice of expert e goes to the i-th row of expert e, if it has so many.
    first_row_E = counts_E.cumsum(0) - counts_E
    first_choice_E = chosen_E.cumsum(0) - chosen_E
    expert_S = chosen_S[by_expert_S]
    place_S = torch.arange(len(expert_S), device=experts_TK.device) - first_choice_E[expert_S]
    has_row_S = place_S < counts_E[expert_S]
    row_S = (first_row_E[expert_S] + place_S)[has_row_S]
    by_expert_S = by_expert_S[has_row_S]

    slots_N = chosen_S.new_full((all_rows,), -1)
    slots_N[row_S] = by_expert_S
    rows_S = torch.full_like(chosen_S, -1)
    rows_S[by_expert_S] = row_S
    return RowMap(slots_N, rows_S.view_as(experts_TK), counts_E)


def permute(x_TD: Tensor, row_map: RowMap) -> Tensor:
    """x_ND: row n is a copy of the token that fills it; a padding row is zero.

    The gradient of a token is the sum of the gradients of its rows.
    """
    _check_tokens(x_TD, row_map)
    choices = row_map.rows_TK.size(1)
    token_N = row_map.slots_N.div(choices, rounding_mode="floor")  # -1 stays -1
    return _append_zero_row(x_TD)[token_N]


def unpermute(y_ND: Tensor, row_map: RowMap, probs_TK: Tensor | None = None) -> Tensor:
    """y_TD: the sum of each token's rows, weighted by its probs; 0 for a token without rows.

    Products and sums are in fp32 for bf16 rows. The result has the dtype of y_ND.
    """
    _check_rows(y_ND, row_map)
    y_TKD = _append_zero_row(y_ND)[row_map.rows_TK].to(accumulation_dtype(y_ND.dtype))
    if probs_TK is not None:
        _check_probs(probs_TK, row_map)
        y_TKD = y_TKD * probs_TK.to(y_TKD.dtype).unsqueeze(-1)
    return y_TKD.sum(dim=1).to(y_ND.dtype)


def grouped_gemm(x_NI: Tensor, w_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """y_NO: the first counts_E[0] rows times w_EIO[0], the next counts_E[1] times w_EIO[1], ...

    The weight gradient of an expert without rows is zero. Rows beyond the last expert's are not
    computed: here they are zeros, and on other backends what lay in their memory.
    """
    left = x_NI.size(0) - int(counts_E.sum())
    if left < 0 or counts_E.numel() != w_EIO.size(0):
        raise ValueError(
            f"counts_E must hold one count for each of {w_EIO.size(0)} experts and sum to at most "
            f"{x_NI.size(0)} rows, not {counts_E.tolist()}"
        )
    *groups, rest = x_NI.split([*counts_E.tolist(), left])
    y_GO = [x_GI @ w_IO for x_GI, w_IO in zip(groups, w_EIO.unbind(), strict=True)]
    return torch.cat([*y_GO, rest.new_zeros(left, w_EIO.size(2))])


def swiglu(gate_NF: Tensor, up_NF: Tensor, probs_N: Tensor | None = None) -> Tensor:
    """h_NF = silu(gate) * up (Shazeer 2020), with row n multiplied by probs_N[n].

    gate_NF, up_NF: the products of the rows with W_g and W_p.
    probs_N: fp32, or fp64 for fp64 rows. The probs are applied here and not to the experts' outputs
        so that these outputs need not be kept for the gradient of the probs.

    For bf16 rows, products are in fp32 and rounded once.
    """
    wide = accumulation_dtype(gate_NF.dtype)
    h_NF = functional.silu(gate_NF.to(wide)) * up_NF.to(wide)
    if probs_N is not None:
        h_NF = h_NF * probs_N.to(wide).unsqueeze(-1)
    return h_NF.to(gate_NF.dtype)


def swiglu_halves(gate_up_N2F: Tensor) -> Tensor:
    """`swiglu` of the left and the right half of each row; the gradients are halves of one too."""
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=1)
    return swiglu(gate_NF, up_NF)


def product(
    a_NI: Tensor, b_IO: Tensor, out_NO: Tensor | None = None, *, accumulate: bool = False
) -> Tensor:
    """a b, without a gradient; in `out`, if it is given, to which `accumulate` adds.

    All may have one more dimension in front: the product for each of its indices. `out` may have a
    wider type than a and b; then the product is not rounded to theirs.
    """
    wide = a_NI.dtype if out_NO is None else out_NO.dtype
    y_NO = a_NI.detach().to(wide) @ b_IO.detach().to(wide)
    if out_NO is None:
        return y_NO
    return out_NO.add_(y_NO) if accumulate else out_NO.copy_(y_NO)


def expert_merge(weights_PE: Tensor, w_EIO: Tensor) -> Tensor:
    """merged_PIO = sum_e weights_PE[p, e] w_EIO[e] (Lory, arXiv 2405.03133, Eq. 2 and 3).

    weights_PE: fp32, or fp64 for fp64 experts. Sums are in the dtype of weights_PE and rounded once
        to the dtype of w_EIO.
    """
    wide = accumulation_dtype(w_EIO.dtype)
    return torch.einsum("pe,eio->pio", weights_PE.to(wide), w_EIO.to(wide)).to(w_EIO.dtype)


def norm_topk(
    x_TD: Tensor,
    w_EDR: Tensor,
    k: int | None,
    bias_E: Tensor | None = None,
    *,
    keep: Keep = "nothing",
    gradient: Gradient = "all",
    chosen: Choose | None = None,
    max_rows: int | None = None,
) -> NormScores:
    """AoE's selection (arXiv 2501.13074, Algorithm 2): C = x W_down, `p = ||C||_2`, `topK(p)`.

    The chosen experts are sorted by norm plus bias, largest first. On a tie, the lower index comes
    first. The gradient of a norm that is 0 is 0.

    k: the number of experts per token. None: `chosen` selects them.
    bias_E: fp32, added to the norms for the selection only.
    keep: how much of C stays in memory for the backward pass. "nothing": the backward pass
        recomputes it. "chosen": C of the chosen experts stays, and is returned as c_TKR for
        `autonomous_experts`. "all": C of every expert whose norm has a gradient also stays, so that
        the backward pass recomputes nothing; c_TKR is then one more copy. Apart from c_TKR, keep
        changes only time and memory, and in this reference it changes nothing.
    gradient: "all": the gradient flows through every norm. "chosen": it flows only through the
        norms of the chosen experts, which saves the native operators E - K products with x per
        token in the backward pass.
    chosen: a rule other than top K. It is a function of the norms, is called without gradient, and
        returns the experts of each token: each expert at most once, -1 in an empty slot. C of an
        empty slot is 0. Unless keep is "nothing", C of all experts is in memory until `chosen`
        returns.
    max_rows: of the row map by which the native operators compute the gradient of `chosen`.

    Raises ValueError unless `chosen` is given alone or 1 <= k <= E.
    """
    check_choice(w_EDR.size(0), k, bias_E, keep, gradient, chosen)
    c_TER = torch.einsum("td,edr->ter", x_TD, w_EDR)
    norms_TE = torch.linalg.vector_norm(c_TER.to(accumulation_dtype(x_TD.dtype)), dim=-1)
    with torch.no_grad():
        if chosen is not None:
            experts_TK = chosen(norms_TE.detach())
        else:
            experts_TK = by_falling_rank(norms_TE, bias_E)[:, :k].contiguous()
    if gradient == "chosen":
        is_chosen_TE = torch.zeros_like(functional.pad(norms_TE, (0, 1)), dtype=torch.bool)
        is_chosen_TE = is_chosen_TE.scatter(1, experts_TK % is_chosen_TE.size(1), True)[:, :-1]
        norms_TE = torch.where(is_chosen_TE, norms_TE, norms_TE.detach())
    c_TKR = c_of_chosen(c_TER, experts_TK) if keep != "nothing" else None
    return NormScores(norms_TE, experts_TK, c_TKR)


def c_of_chosen(c_TER: Tensor, experts_TK: Tensor) -> Tensor:
    """c_TKR: C of each token's chosen experts; 0 in empty slots (-1)."""
    experts_TK1 = experts_TK.unsqueeze(-1)
    index_TKR = experts_TK1.clamp(min=0).expand(-1, -1, c_TER.size(2))
    return c_TER.gather(1, index_TKR).masked_fill(experts_TK1 < 0, 0)


def check_choice(
    num_experts: int,
    k: int | None,
    bias_E: Tensor | None,
    keep: Keep,
    gradient: Gradient,
    chosen: Choose | None,
) -> None:
    """Raise ValueError if arguments of `norm_topk` are out of range or exclude each other."""
    for name, value, values in (("keep", keep, Keep), ("gradient", gradient, Gradient)):
        if value not in get_args(values):
            raise ValueError(f"{name} must be one of {', '.join(get_args(values))}, not {value!r}")
    if chosen is not None:
        if k is not None or bias_E is not None:
            raise ValueError("k and bias_E belong to top-K: omit them when chosen is given")
        return
    if k is None or not 1 <= k <= num_experts:
        raise ValueError(f"k must lie in 1..{num_experts} (the number of experts), not {k}")


def by_falling_rank(norms_TE: Tensor, bias_E: Tensor | None) -> Tensor:
    """All experts of each token, sorted by norm + bias, largest first; on a tie, by index."""
    rank_TE = norms_TE if bias_E is None else norms_TE + bias_E
    return rank_TE.sort(dim=-1, descending=True, stable=True).indices


def routed_experts(
    x_TD: Tensor,
    probs_TK: Tensor,
    row_map: RowMap,
    w_gate_up_ED2F: Tensor,
    w_out_EFD: Tensor,
    *,
    main_gradients: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """y_TD = sum over each token's experts of prob * (silu(x W_g) * (x W_p)) W_o.

    w_gate_up_ED2F: [E, D, 2F], W_g then W_p; the experts' parameter [L, D, 2, F] with its last two
        axes flattened.
    main_gradients: one tensor for each weight; see `add_gradient_to`.
    """
    if main_gradients is not None:
        w_gate_up_ED2F = add_gradient_to(main_gradients[0], w_gate_up_ED2F)
        w_out_EFD = add_gradient_to(main_gradients[1], w_out_EFD)
    x_ND = permute(x_TD, row_map)
    gate_NF, up_NF = grouped_gemm(x_ND, w_gate_up_ED2F, row_map.counts_E).chunk(2, dim=1)
    h_NF = swiglu(gate_NF, up_NF, _probs_of_rows(probs_TK, row_map))
    return unpermute(grouped_gemm(h_NF, w_out_EFD, row_map.counts_E), row_map)


def autonomous_experts(
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
) -> Tensor:
    """y_TD = sum over each token's experts of prob * (silu(x W_down W_up) * (x W_p)) W_o.

    AoE's experts (arXiv 2501.13074, Algorithm 2).

    c_TKR: C = x W_down of the choices, as `norm_topk` returns it. If it is given, w_down_EDR is
        used only with norms_TK, and without norms_TK the gradient of C flows back to the selection.
        None: C is computed here.
    norms_TK: the norms of c_TKR, which is then required. probs_TK must be their softmax over a
        token's choices. c_TKR, norms_TK and probs_TK are then constants: their gradient goes to x
        and w_down here, in the same pass as that of the experts. Every choice has exactly one row,
        and there are no other rows. None: the gradient of the probs flows back.
    recompute_gate: recompute C W_up in the backward pass instead of keeping it. It changes only
        time and memory, and in this reference it changes nothing.
    main_gradients: one tensor for each of W_up, W_p and W_out; see `add_gradient_to`.

    Raises ValueError if norms_TK is given without c_TKR or for another number of rows.
    """
    check_norms(norms_TK, c_TKR, row_map)
    if main_gradients is not None:
        weights = (w_up_ERW, w_p_EDW, w_out_EWD)
        w_up_ERW, w_p_EDW, w_out_EWD = map(add_gradient_to, main_gradients, weights)
    counts_E = row_map.counts_E
    x_ND = permute(x_TD, row_map)
    if norms_TK is not None:
        c_NR = grouped_gemm(x_ND, w_down_EDR, counts_E)
        norms_N = torch.linalg.vector_norm(c_NR.to(accumulation_dtype(c_NR.dtype)), dim=1)
        probs_TK = norms_N[row_map.rows_TK].softmax(dim=1)
    elif c_TKR is None:
        c_NR = grouped_gemm(x_ND, w_down_EDR, counts_E)
    else:
        c_NR = _append_zero_row(c_TKR.flatten(0, 1))[row_map.slots_N]
    g_NW, p_NW = grouped_gemm(c_NR, w_up_ERW, counts_E), grouped_gemm(x_ND, w_p_EDW, counts_E)
    h_NW = swiglu(g_NW, p_NW, _probs_of_rows(probs_TK, row_map))
    return unpermute(grouped_gemm(h_NW, w_out_EWD, counts_E), row_map)


def check_norms(norms_TK: Tensor | None, c_TKR: Tensor | None, row_map: RowMap) -> None:
    """Raise ValueError if `autonomous_experts` cannot differentiate these norms."""
    if norms_TK is None:
        return
    if c_TKR is None:
        raise ValueError("norms_TK are the norms of c_TKR: give both")
    if row_map.slots_N.size(0) != row_map.rows_TK.numel():
        raise ValueError(
            f"with norms_TK every choice has a row: {row_map.rows_TK.numel()} choices have "
            f"{row_map.slots_N.size(0)} rows"
        )


def add_gradient_to(main: Tensor, w: Tensor) -> Tensor:
    """Returns w. The backward pass adds the gradient of w to `main`, and w itself gets none.

    main: [*w.shape], a sum over backward passes; fp32 for bf16 weights. This reference rounds the
        gradient to the dtype of w before it is added. The native operators do not round it.
    """
    return _AddedGradient.apply(w, main)


class _AddedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, main: Tensor) -> Tensor:
        ctx.main = main  # not by save_for_backward, because other backward passes add to it
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.main.add_(gradients[0])
        return None, None


def _probs_of_rows(probs_TK: Tensor, row_map: RowMap) -> Tensor:
    """The prob of each row, 0 in padding rows: [N]."""
    _check_probs(probs_TK, row_map)
    return functional.pad(probs_TK.flatten(), (0, 1))[row_map.slots_N]


def _append_zero_row(x: Tensor) -> Tensor:
    """Appends one zero row, so that index -1 selects zeros."""
    return functional.pad(x, (0, 0, 0, 1))


def _check_tokens(x_TD: Tensor, row_map: RowMap) -> None:
    if x_TD.size(0) != row_map.rows_TK.size(0):
        raise ValueError(f"x_TD has {x_TD.size(0)} tokens, the row map {row_map.rows_TK.size(0)}")


def _check_rows(y_ND: Tensor, row_map: RowMap) -> None:
    if y_ND.size(0) != row_map.slots_N.size(0):
        raise ValueError(f"y_ND has {y_ND.size(0)} rows, the row map {row_map.slots_N.size(0)}")


def _check_probs(probs_TK: Tensor, row_map: RowMap) -> None:
    if probs_TK.shape != row_map.rows_TK.shape:
        raise ValueError(
            f"probs_TK is {tuple(probs_TK.shape)}, the row map {tuple(row_map.rows_TK.shape)}"
        )
