"""Benches of permute and unpermute, which copy rows and multiply only by probs."""

from __future__ import annotations

from moe_parallel.ops import Ops
from tools.bench.contender import (
    BACKWARD,
    FORWARD,
    OURS,
    Bench,
    BenchContender,
    Forward,
    Measure,
    Moved,
)
from tools.bench.inputs import Draw, leaf
from tools.bench.peers import torch_ops, transformer_engine
from tools.bench.sizes import BenchSize


def permute(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    x_TD = leaf(draw.normal(size.T, size.d, seed=1))
    experts_TK = draw.experts(size)
    row_map = ours.routing_map(experts_TK, size.n)
    token_N = torch_ops.token_of_row(row_map)
    dy_ND = draw.normal(size.rows, size.d, seed=2)

    def contender(name: str, forward: Forward) -> BenchContender:
        return BenchContender(name, forward, {"x": x_TD}, upstream=(dy_ND,))

    forward = x_TD.nbytes + dy_ND.nbytes + row_map.slots_N.nbytes
    backward = dy_ND.nbytes + x_TD.nbytes + row_map.rows_TK.nbytes
    return Bench(
        "permute",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.permute(x_TD, row_map)])],
        [
            contender("torch index_select", lambda: [x_TD.index_select(0, token_N)]),
            *transformer_engine.permute_peers(x_TD, experts_TK, size.rows, dy_ND),
        ],
        (Measure(FORWARD, Moved(forward)), Measure(BACKWARD, Moved(backward))),
    )


def unpermute(size: BenchSize, draw: Draw, ours: Ops) -> Bench:
    experts_TK = draw.experts(size)
    row_map = ours.routing_map(experts_TK, size.n)
    y_ND = leaf(draw.normal(size.rows, size.d, seed=1))
    probs_TK = leaf(draw.probs(size))
    dout_TD = draw.normal(size.T, size.d, seed=2)

    def contender(name: str, forward: Forward) -> BenchContender:
        return BenchContender(name, forward, {"y": y_ND, "probs": probs_TK}, upstream=(dout_TD,))

    forward = y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes + probs_TK.nbytes
    backward = 2 * y_ND.nbytes + dout_TD.nbytes + row_map.rows_TK.nbytes + 2 * probs_TK.nbytes
    return Bench(
        "unpermute",
        size,
        draw.dtype,
        [contender(OURS, lambda: [ours.unpermute(y_ND, row_map, probs_TK)])],
        [
            contender("torch index_add", lambda: [torch_ops.unpermute(y_ND, row_map, probs_TK)]),
            *transformer_engine.unpermute_peers(y_ND, experts_TK, probs_TK, dout_TD),
        ],
        (Measure(FORWARD, Moved(forward)), Measure(BACKWARD, Moved(backward))),
    )
