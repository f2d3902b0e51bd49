"""Perplexity and bits per byte of documents, with confidence intervals over documents.

A document is scored by windows of the model's length that move by `stride` tokens. Each token is
scored once, in the first window that contains it, after a token that ends a document or the BOS of
an imported model: a short document is thus scored as a whole, and a token of a long one has at
least length - stride tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_parallel.evaluation.model import ReadingModel, Span, score
from moe_parallel.evaluation.text_loss import TextLoss

#: The quantile of the normal distribution that belongs to intervals of 95%.
Z_95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A ratio, and half the width of its interval of 95%; None: one document has none."""

    value: float
    margin: float | None


@dataclass(frozen=True)
class DomainLoss:
    """The losses of the documents of a domain."""

    documents: tuple[TextLoss, ...]

    @property
    def whole(self) -> TextLoss:
        """All documents together."""
        return TextLoss(
            sum(each.nats for each in self.documents),
            sum(each.tokens for each in self.documents),
            sum(each.num_bytes for each in self.documents),
        )

    @property
    def nats_per_token(self) -> Estimate:
        return ratio([(each.nats, each.tokens) for each in self.documents])

    @property
    def bits_per_byte(self) -> Estimate:
        bits = [(each.nats / math.log(2), each.num_bytes) for each in self.documents]
        return ratio(bits)

    @property
    def perplexity(self) -> tuple[float, float, float]:
        """e to the loss per token, and the ends of its interval (twice the value: none)."""
        loss = self.nats_per_token
        margin = loss.margin or 0.0
        return (math.exp(loss.value), math.exp(loss.value - margin), math.exp(loss.value + margin))


def ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """sum(y) / sum(x) of pairs (y, x), with an interval over the pairs.

    The standard error is that of the ratio estimator, by its linearization (Cochran, Sampling
    Techniques, 1977, section 6.4):

        r = sum y / sum x,   se^2 = n / (n - 1) * sum (y_i - r x_i)^2 / (sum x)^2
    """
    n, total = len(pairs), sum(x for _, x in pairs)
    if not total:
        return Estimate(0.0, None)
    r = sum(y for y, _ in pairs) / total
    if n < 2:
        return Estimate(r, None)
    squares = sum((y - r * x) ** 2 for y, x in pairs)
    return Estimate(r, Z_95 * math.sqrt(n / (n - 1) * squares) / total)


def windows(tokens: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, first scored, end) of the windows over the tokens of a document.

    Positions count the token before the document as 0, so the document has the positions 1 to
    `tokens`. A window has the positions from start to end, both included, and at most length + 1:
    the model reads all but the last.
    """
    found, start, scored = [], 0, 0
    while scored < tokens:
        end = min(start + length, tokens)
        found.append((start, scored + 1, end))
        start, scored = start + stride, end
    return found


def evaluate_documents(
    model: ReadingModel,
    documents: Sequence[Sequence[int]],
    bytes_per_token: Sequence[int],
    before_text: int,
    stride: int,
    batch_size: int,
    advance: Callable[[int], object] = lambda count: None,
) -> DomainLoss:
    """The losses of documents. Collective; the result is the same on every rank.

    Args:
        documents: token ids, without the token that ends a document; at least one token each.
        before_text: the token before each.
        bytes_per_token: UTF-8 bytes of each token of the vocabulary.
        stride: from 1 to --seq-length.
        batch_size: windows that a data-parallel rank computes at a time.
        advance: called with the number of windows that were scored.
    """
    length = model.config.training.seq_length
    spans: list[Span] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        whole = [before_text, *document]
        for start, first, end in windows(len(document), length, stride):
            spans.append(Span(whole[start : end + 1], first - start))
            owners.append(number)
    nats = [0.0] * len(documents)
    for owner, each in zip(owners, score(model, spans, batch_size, advance), strict=True):
        nats[owner] += each
    return DomainLoss(
        tuple(
            TextLoss(loss, len(document), int(sum(bytes_per_token[token] for token in document)))
            for loss, document in zip(nats, documents, strict=True)
        )
    )


def count_windows(documents: Sequence[Sequence[int]], length: int, stride: int) -> int:
    """The number of windows over documents."""
    return sum(len(windows(len(document), length, stride)) for document in documents)
