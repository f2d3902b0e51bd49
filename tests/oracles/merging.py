"""Merged experts and segment-level expert choice, token by token, as loops in numpy fp64.

Written from Lory (sections 2.2, 3.1, 5.1, 5.3) and SMEAR. Shape suffixes as in `layers`, and S
tokens of a sequence, B sequences.

The weights of the first segment are an argument, because their gradient is stopped: finite
differences must not change them.
"""

import math
from typing import Any

import numpy

from tests.oracles.layers import Array, Routing, silu, softmax

Segment = list[int]  # positions


def segments(tokens: int, length: int) -> list[Segment]:
    """The positions of each segment of `length` tokens; the last segment may be shorter."""
    found: list[Segment] = []
    for position in range(tokens):
        if position % length == 0:
            found.append([])
        found[-1].append(position)
    return found


def mean(x_SBD: Array, sequence: int, segment: Segment) -> Array:
    total = numpy.zeros(x_SBD.shape[2])
    for position in segment:
        total += x_SBD[position, sequence]
    return total / len(segment)


def weights_of(x_SBD: Array, w_ED: Array, sequence: int, segment: Segment) -> Array:
    """e = softmax(R h); h is the mean of the segment."""
    h = mean(x_SBD, sequence, segment)
    return softmax(numpy.array([numpy.dot(w, h) for w in w_ED]))


def first_weights(x_SBD: Array, w_ED: Array, length: int, kind: str) -> list[Array]:
    """The weights that merge the experts for the first segment of each sequence."""
    segment = segments(len(x_SBD), length)[0]
    sequences = range(x_SBD.shape[1])
    if kind == "uniform":
        return [numpy.full(len(w_ED), 1 / len(w_ED)) for _ in sequences]
    return [weights_of(x_SBD, w_ED, b, segment) for b in sequences]


def lory_weights(x_SBD: Array, w_ED: Array, length: int, first: list[Array]) -> Array:
    """The weights that merge the experts for each token: [S, B, E]."""
    found = numpy.zeros((*x_SBD.shape[:2], len(w_ED)))
    for b in range(x_SBD.shape[1]):
        before = None
        for segment in segments(len(x_SBD), length):
            e = first[b] if before is None else weights_of(x_SBD, w_ED, b, before)
            for position in segment:
                found[position, b] = e
            before = segment
    return found


def prefix_weights(x_SBD: Array, w_ED: Array, length: int, first: list[Array]) -> Array:
    found = numpy.zeros((*x_SBD.shape[:2], len(w_ED)))
    for b in range(x_SBD.shape[1]):
        prefix = segments(len(x_SBD), length)[0]
        e = weights_of(x_SBD, w_ED, b, prefix)
        for position in range(len(x_SBD)):
            found[position, b] = first[b] if position in prefix else e
    return found


def smear_weights(x_SBD: Array, w_ED: Array) -> Array:
    found = numpy.zeros((*x_SBD.shape[:2], len(w_ED)))
    for b in range(x_SBD.shape[1]):
        h = normed(mean(x_SBD, b, list(range(len(x_SBD)))))
        logits = [numpy.dot(normed(w), h) / math.sqrt(len(h)) for w in w_ED]
        found[:, b] = softmax(numpy.array(logits))
    return found


def normed(x_D: Array, epsilon: float = 1e-5) -> Array:
    centered = x_D - x_D.mean()
    return centered / math.sqrt((centered**2).mean() + epsilon)


def merged_output(x_SBD: Array, weights_SBE: Array, gate_up_ED2F: Array, out_EFD: Array) -> Array:
    """The output of each token, computed with the experts that are merged for it."""
    y_SBD = numpy.zeros_like(x_SBD)
    for s in range(x_SBD.shape[0]):
        for b in range(x_SBD.shape[1]):
            gate_up, out = 0.0, 0.0
            for e, weight in enumerate(weights_SBE[s, b]):
                gate_up = gate_up + weight * gate_up_ED2F[e]
                out = out + weight * out_EFD[e]
            h = silu(x_SBD[s, b] @ gate_up[:, 0]) * (x_SBD[s, b] @ gate_up[:, 1])
            y_SBD[s, b] = h @ out
    return y_SBD


def logits_of(x_SBD: Array, w_ED: Array, sequence: int, segment: Segment) -> Array:
    h = mean(x_SBD, sequence, segment)
    return numpy.array([numpy.dot(w, h) for w in w_ED])


def first_logits(x_SBD: Array, w_ED: Array, length: int) -> list[Array]:
    """The logits of the first segment of each sequence: B arrays of shape [E]."""
    segment = segments(len(x_SBD), length)[0]
    return [logits_of(x_SBD, w_ED, b, segment) for b in range(x_SBD.shape[1])]


def segment_logits(x_SBD: Array, w_ED: Array, length: int, first: list[Array]) -> Array:
    """The logits that rank each token's segment: [S, B, E]."""
    found = numpy.zeros((*x_SBD.shape[:2], len(w_ED)))
    for b in range(x_SBD.shape[1]):
        before = None
        for segment in segments(len(x_SBD), length):
            logits = first[b] if before is None else logits_of(x_SBD, w_ED, b, before)
            for position in segment:
                found[position, b] = logits
            before = segment
    return found


def segment_expert_choice(
    logits_SBE: Array, length: int, factor: float, raw: bool, ranked_SBE: Array | None = None
) -> tuple[Routing, int]:
    """Each expert takes its best segments; tokens in order [S, B]. Also returns the number taken.

    The first and the second segment of a sequence always tie, because the logits of the first
    segment rank both. Finite differences would break the ties, so they may pass separate ranks.
    """
    tokens, sequences, experts = logits_SBE.shape
    cut = segments(tokens, length)
    whole = [(g, b) for g in range(len(cut)) for b in range(sequences)]
    taken = min(len(whole), max(1, math.floor(factor * len(whole) / experts + 0.5)))

    def value(all_SBE: Array, g: int, b: int) -> Array:
        logits = all_SBE[cut[g][0], b]
        return logits if raw else softmax(logits)

    ranks = {each: value(logits_SBE if ranked_SBE is None else ranked_SBE, *each) for each in whole}
    chosen: dict[Any, list[int]] = {each: [] for each in whole}
    for expert in range(experts):
        order = sorted(whole, key=lambda each: -ranks[each][expert])
        for each in order[:taken]:
            chosen[each].append(expert)
    rows: list[list[int | None]] = []
    probs = []
    for position in range(tokens):
        for b in range(sequences):
            each = (position // length, b)
            rows.append(list(chosen[each]))
            probs.append([float(value(logits_SBE, *each)[expert]) for expert in chosen[each]])
    return Routing(logits_SBE.reshape(-1, experts), rows, probs), taken
