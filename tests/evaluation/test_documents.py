"""Bits per byte of documents: windows by hand, intervals by resampling, losses by hand."""

import numpy as np
import pytest
import torch

from moe_parallel.evaluation.documents import evaluate_documents, ratio, windows
from moe_parallel.parallel import destroy_groups
from tests.distributed import run_distributed
from tests.evaluation.reading import VOCABULARY, small_model


@pytest.mark.parametrize("length", [1, 4, 7])
def test_every_token_is_scored_once_with_enough_before_it(length: int) -> None:
    for tokens in range(1, 30):
        for stride in range(1, length + 1):
            scored = []
            for start, first, end in windows(tokens, length, stride):
                assert end - start <= length and start < first <= end
                if start:
                    assert first - start > length - stride
                scored += range(first, end + 1)
            assert scored == list(range(1, tokens + 1))


def test_the_interval_of_a_ratio_is_that_of_resampling() -> None:
    random = np.random.default_rng(0)
    x = random.integers(20, 400, size=300).astype(float)
    y = x * random.normal(1.5, 0.3, size=300)
    estimate = ratio(list(zip(y, x, strict=True)))
    assert estimate.value == pytest.approx(y.sum() / x.sum())
    picks = random.integers(0, 300, size=(4000, 300))
    resampled = y[picks].sum(1) / x[picks].sum(1)
    assert estimate.margin == pytest.approx(1.96 * resampled.std(), rel=0.06)


EOD = VOCABULARY - 1
DOCUMENTS = [[(7 * i + n) % EOD for i in range(n)] for n in (1, 70, 32, 33, 9)]


def _by_model(options, stride):
    model = small_model({"seq_length": 32} | options)
    bytes_per_token = list(range(VOCABULARY))
    found = evaluate_documents(model, DOCUMENTS, bytes_per_token, EOD, stride, batch_size=3)
    direct = [_directly(model, document, stride) for document in DOCUMENTS]
    destroy_groups()
    return [(each.nats, each.tokens, each.num_bytes) for each in found.documents], direct


def _directly(model, document, stride):
    """The sum of -ln p; each token is scored with the earliest tokens that fit before it."""
    whole, total = [EOD, *document], 0.0
    for place in range(1, len(whole)):
        start = 0
        while place - start > 32:
            start += stride
        tokens = torch.tensor([whole[start:place]])
        with torch.no_grad():
            logits = model.chunk(tokens, torch.arange(place - start)[None], None)[0, -1]
            logits = logits[:VOCABULARY]  # without padding
        total -= logits.double().log_softmax(-1)[whole[place]].item()
    return total


@pytest.mark.parametrize(("stride", "options"), [(32, {}), (5, {}), (5, {"loss_chunk_size": 0})])
def test_losses_are_what_the_model_says_of_each_token(stride: int, options) -> None:
    ((found, direct),) = run_distributed(1, _by_model, options, stride)
    for (nats, tokens, num_bytes), expected, document in zip(found, direct, DOCUMENTS, strict=True):
        assert nats == pytest.approx(expected, rel=1e-5)
        assert (tokens, num_bytes) == (len(document), sum(document))


@pytest.mark.full
def test_two_ranks_share_the_windows() -> None:
    ((alone, _),) = run_distributed(1, _by_model, {}, 5)
    for found, _ in run_distributed(2, _by_model, {"expert_model_parallel_size": 2}, 5):
        assert [each[1:] for each in found] == [each[1:] for each in alone]
        assert [each[0] for each in found] == pytest.approx([each[0] for each in alone], rel=1e-5)
