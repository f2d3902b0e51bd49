"""Transformer Engine's permutation and grouped linear, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_parallel.ops import RowMap
from tools.bench.measurement import Absent, BenchContender, Values, invite, peer_package

PERMUTE, UNPERMUTE, GROUPED_LINEAR = "TE moe_permute", "TE moe_unpermute", "TE GroupedLinear"


def permute_peers(
    x_TD: Tensor, experts_TK: Tensor, rows: int, dy_ND: Tensor
) -> list[BenchContender | Absent]:
    def build() -> BenchContender:
        te = peer_package("transformer_engine.pytorch", x_TD)
        choices_TK = experts_TK.int()

        def forward() -> list[Tensor]:
            return [te.moe_permute(x_TD, choices_TK, rows, map_type="index")[0]]

        return BenchContender(PERMUTE, forward, {"x": x_TD}, upstream=(dy_ND,))

    return [invite(PERMUTE, build)]


def unpermute_peers(
    y_ND: Tensor, experts_TK: Tensor, probs_TK: Tensor, dout_TD: Tensor
) -> list[BenchContender | Absent]:
    def build() -> BenchContender:
        te = peer_package("transformer_engine.pytorch", y_ND)
        x_TD = torch.zeros_like(dout_TD)  # TE builds its row map while it permutes
        _, row_id_map = te.moe_permute(x_TD, experts_TK.int(), y_ND.size(0), map_type="index")

        def forward() -> list[Tensor]:
            return [te.moe_unpermute(y_ND, row_id_map, probs_TK, map_type="index")]

        return BenchContender(
            UNPERMUTE, forward, {"y": y_ND, "probs": probs_TK}, upstream=(dout_TD,)
        )

    return [invite(UNPERMUTE, build)]


def grouped_gemm_peers(
    x_NI: Tensor, w_EIO: Tensor, row_map: RowMap, dy_NO: Tensor
) -> list[BenchContender | Absent]:
    def build() -> BenchContender:
        te = peer_package("transformer_engine.pytorch", x_NI)
        experts, inner, columns = w_EIO.shape
        linear = te.GroupedLinear(
            experts, inner, columns, bias=False, params_dtype=x_NI.dtype, device=x_NI.device
        )
        weights = [getattr(linear, f"weight{expert}") for expert in range(experts)]
        for weight, w_IO in zip(weights, w_EIO.detach(), strict=True):
            weight.data.copy_(w_IO.t())
        counts = row_map.counts_E.tolist()
        names = [f"w {expert}" for expert in range(experts)]

        def canonical(gradients: Values) -> Values:
            return {"x": gradients["x"], "w": torch.stack([gradients[n].t() for n in names])}

        return BenchContender(
            GROUPED_LINEAR,
            lambda: [linear(x_NI, counts)],
            {"x": x_NI} | dict(zip(names, weights, strict=True)),
            frozenset(names),
            (dy_NO,),
            canonical,
        )

    return [invite(GROUPED_LINEAR, build)]
