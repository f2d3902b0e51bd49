"""e4m3 by its definition (OCP 8-bit floating point, 1.0): 4 exponent bits, 3 fraction bits."""

import numpy as np

GREATEST = 448.0
LEAST_EXPONENT = -6


def e4m3(values):
    """The nearest e4m3 values, ties to an even fraction; larger values become the maximum."""
    magnitude = np.abs(values)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**LEAST_EXPONENT)))
    step = 2.0 ** (exponent - 3)
    return np.sign(values) * np.minimum(np.rint(magnitude / step) * step, GREATEST)


def rounded(values, axes):
    """`values` rounded to e4m3; the scale maps the maximum along `axes` to the maximum of e4m3."""
    values = values.astype(np.float32)
    scale = np.abs(values).max(axes, keepdims=True, initial=0) / np.float32(GREATEST)
    scale[scale == 0] = 1
    return e4m3((values / scale).astype(np.float64)) * scale.astype(np.float64)


def norms(x, w):
    """||x[t] w[e]|| of tokens [T, D] and experts [E, D, R], each rounded with its own scale."""
    c = np.einsum("td,edr->ter", rounded(x, (1,)), rounded(w, (1, 2)))
    return np.sqrt((c * c).sum(-1))
