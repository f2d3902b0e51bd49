"""AoE's selection among candidates: FP8 says whose norms are computed."""

import torch
from torch import Tensor

from moe_parallel.ops.fp8_norms import fp8_norms
from moe_parallel.ops.native.permute import routing_map
from moe_parallel.ops.reference import accumulation_dtype, by_falling_rank

_ops = torch.ops.moe_parallel


def screened_topk(
    x_TD: Tensor, w_EDR: Tensor, k: int, bias_E: Tensor | None, screening: int
) -> tuple[Tensor, Tensor, Tensor]:
    """norms_TE, experts_TK and C of these, [T, K, R]: k + screening products a token with x."""
    norms_TE = fp8_norms(x_TD, w_EDR).to(accumulation_dtype(x_TD.dtype))
    candidates_TC = by_falling_rank(norms_TE, bias_E)[:, : k + screening].contiguous()
    slots, rows_TC, counts = routing_map(candidates_TC, w_EDR.size(0), all_chosen=True)
    c_NR = _ops.grouped_gemm(_ops.permute(x_TD, slots, rows_TC), w_EDR, counts)

    norms_N = torch.linalg.vector_norm(c_NR.to(norms_TE.dtype), dim=1)
    norms_TE.scatter_(1, candidates_TC, norms_N[rows_TC])
    others_TE = torch.ones_like(norms_TE, dtype=torch.bool).scatter(1, candidates_TC, False)
    experts_TK = by_falling_rank(norms_TE, bias_E, others_TE)[:, :k].contiguous()
    row_TE = torch.zeros_like(others_TE, dtype=torch.int64).scatter(1, candidates_TC, rows_TC)
    return norms_TE, experts_TK, c_NR[row_TE.gather(1, experts_TK)]
