"""The sort in several chunks; the CPU's operator has only one chunk."""

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np
import pytest

from tests.cuda_host.emulation import structure
from tests.oracles import ops as oracle

pytestmark = pytest.mark.full

CountChoices = structure(
    experts=c_void_p,
    counts=c_void_p,
    choices=c_int64,
    num_experts=c_int64,
    chunks=c_int64,
    chunk_size=c_int64,
)
FindRows = structure(
    chunk_counts=c_void_p,
    counts=c_void_p,
    first_row=c_void_p,
    num_experts=c_int64,
    pad_rows_per_expert=c_int64,
    max_rows=c_int64,
    chunks=c_int64,
)
PlaceChoices = structure(
    experts=c_void_p,
    first_row=c_void_p,
    slots=c_void_p,
    rows=c_void_p,
    choices=c_int64,
    num_experts=c_int64,
    num_rows=c_int64,
    pad_rows_per_expert=c_int64,
    chunks=c_int64,
    chunk_size=c_int64,
)


@pytest.mark.parametrize(
    "choices, num_experts, chunk_size",
    [(1, 1, 512), (512, 7, 512), (513, 7, 512), (3001, 64, 512), (2000, 1500, 333), (40, 3, 1)],
)
def test_equals_the_oracle(kernels, choices, num_experts, chunk_size):
    chunks = -(-choices // chunk_size)
    experts = np.random.default_rng(0).integers(-1, num_experts, choices)
    counts = np.full((num_experts + 1, chunks), -7, dtype=np.int64)
    cut = {
        "choices": choices,
        "num_experts": num_experts,
        "chunks": chunks,
        "chunk_size": chunk_size,
    }
    count = CountChoices(experts=experts.ctypes.data, counts=counts.ctypes.data, **cut)
    kernels.count_choices(ctypes.byref(count))
    wanted = np.zeros_like(counts)
    bins = np.where(experts < 0, num_experts, experts)
    np.add.at(wanted, (bins, np.arange(choices) // chunk_size), 1)
    np.testing.assert_array_equal(counts, wanted)

    by_expert = wanted[:-1].reshape(-1)
    num_rows = int(by_expert.sum())
    first_row, counts_E = find_rows(kernels, counts, pad_rows_per_expert=-1)
    np.testing.assert_array_equal(counts_E, wanted[:-1].sum(1))
    np.testing.assert_array_equal(first_row.reshape(-1), np.cumsum(by_expert) - by_expert)
    slots, rows = np.full(num_rows, -1), np.full(choices, -1)
    place = PlaceChoices(
        experts=experts.ctypes.data,
        first_row=first_row.ctypes.data,
        slots=slots.ctypes.data,
        rows=rows.ctypes.data,
        num_rows=num_rows,
        pad_rows_per_expert=-1,
        **cut,
    )
    kernels.place_choices(ctypes.byref(place))
    wanted_slots, wanted_rows, _ = oracle.routing_map(experts[:, None], num_experts)
    np.testing.assert_array_equal(slots, wanted_slots)
    np.testing.assert_array_equal(rows, wanted_rows[:, 0])


def find_rows(kernels, chunk_counts, pad_rows_per_expert, max_rows=1 << 40):
    num_experts, chunks = len(chunk_counts) - 1, chunk_counts.shape[1]
    counts, first_row = np.full(num_experts, -7), np.full((num_experts, chunks), -7)
    task = FindRows(
        chunk_counts=chunk_counts.ctypes.data,
        counts=counts.ctypes.data,
        first_row=first_row.ctypes.data,
        num_experts=num_experts,
        pad_rows_per_expert=pad_rows_per_expert,
        max_rows=max_rows,
        chunks=chunks,
    )
    kernels.find_rows(ctypes.byref(task))
    return first_row, counts


def test_what_overflows_a_capacity_is_not_placed(kernels):
    experts, first_row = np.array([1, 0, 1, 1, 0]), np.array([0, 2])
    slots, rows = np.full(4, -1), np.full(5, -1)
    place = PlaceChoices(
        experts=experts.ctypes.data,
        first_row=first_row.ctypes.data,
        slots=slots.ctypes.data,
        rows=rows.ctypes.data,
        choices=5,
        num_experts=2,
        num_rows=4,
        pad_rows_per_expert=2,
        chunks=1,
        chunk_size=512,
    )
    kernels.place_choices(ctypes.byref(place))
    assert slots.tolist() == [1, 4, 0, 2]
    assert rows.tolist() == [2, 0, 3, -1, 1]
