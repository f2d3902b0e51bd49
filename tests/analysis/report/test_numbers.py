"""Numbers for the page: what JSON and bytes keep of them."""

import base64
import json
import math

import numpy as np
import pytest

from moe_parallel.analysis.report.numbers import as_bytes, short, shorts


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.23456789, 1.2346), (123456789.0, 123460000), (2.0, 2), (0.0, 0), (-1e-9, -1e-9)]
    + [(math.nan, None), (math.inf, None), (None, None)],
)  # fmt: skip
def test_short(value, shown):
    assert short(value) == shown


def test_nested_numbers_are_json():
    text = json.dumps(shorts([np.array([1.0, np.nan]), [2.123456789, None]]), allow_nan=False)
    assert json.loads(text) == [[1, None], [2.1235, None]]


def test_bytes_have_steps_of_top_over_254():
    values = np.array([[0.0, 1.0, 2.5], [4.0, 9.0, np.nan]])
    coded = as_bytes(values, 4.0)
    assert coded["shape"] == [2, 3] and coded["top"] == 4
    found = np.frombuffer(base64.b64decode(coded["data"]), dtype=np.uint8)
    assert found[5] == 255
    decoded = found[:5] / 254 * 4.0
    assert np.abs(decoded - [0, 1, 2.5, 4, 4]).max() <= 4 / 254 / 2 + 1e-12
    assert as_bytes(np.zeros(2), 0.0)["data"] == base64.b64encode(b"\0\0").decode()
