"""e4m3 by its definition (OCP 8-bit floating point, 1.0): 4 bits of exponent, 3 of fraction."""

import numpy as np

GREATEST = 448.0
LEAST_EXPONENT = -6


def e4m3(values):
    """The nearest of e4m3, ties to an even fraction; beyond the greatest: the greatest."""
    magnitude = np.abs(values)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**LEAST_EXPONENT)))
    step = 2.0 ** (exponent - 3)
    return np.sign(values) * np.minimum(np.rint(magnitude / step) * step, GREATEST)


def rounded(values, axes):
    """`values`, fp32, of which the greatest along `axes` is scaled to the greatest of e4m3."""
    values = values.astype(np.float32)
    scale = np.abs(values).max(axes, keepdims=True, initial=0) / np.float32(GREATEST)
    scale[scale == 0] = 1
    return e4m3((values / scale).astype(np.float64)) * scale.astype(np.float64)


def norms(x, w):
    """||x[t] w[e]|| of tokens [T, D] and experts [E, D, R], each rounded by a scale of its own."""
    c = np.einsum("td,edr->ter", rounded(x, (1,)), rounded(w, (1, 2)))
    return np.sqrt((c * c).sum(-1))
