import lzma
import math

import numpy as np
import pytest

from moe_parallel.evaluation.baselines import (
    ByteModel,
    held_out_bits_per_byte,
    joined,
)

U = 1 / 256


def array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def test_a_unigram_by_hand() -> None:
    # "aab": N = 3, T = 2; a twice, b once, c never.
    model = ByteModel(array(b"aab"), 1)
    expected = [(2 + 2 * U) / 5, (1 + 2 * U) / 5, 2 * U / 5]
    np.testing.assert_allclose(model.probabilities(array(b"abc")), expected, rtol=1e-14)
    assert model.bits(array(b"abc")) == pytest.approx(-sum(map(math.log2, expected)))


def test_a_trigram_by_hand() -> None:
    # "abcabd" -> after "ab": c and d once each; after "b": the same; after "d": nothing.
    model = ByteModel(array(b"abcabd"), 3)
    c1 = (1 + 4 * U) / 10  # N = 6, T = 4
    c2 = (1 + 2 * c1) / 4
    c3 = (1 + 2 * c2) / 4
    assert model.probabilities(array(b"abc")) == pytest.approx([c3], rel=1e-14)
    # "xb" never occurred, so "b" predicts. "xd" and "d" predict nothing, so single bytes do.
    assert model.probabilities(array(b"xbc")) == pytest.approx([c2], rel=1e-14)
    assert model.probabilities(array(b"xdc")) == pytest.approx([c1], rel=1e-14)
    # The first byte has no context, the second has one byte of context.
    a1 = (2 + 4 * U) / 10
    b2 = (2 + 1 * (2 + 4 * U) / 10) / 3
    bits = -math.log2(a1) - math.log2(b2) - math.log2(c3)
    assert model.bits(array(b"abc")) == pytest.approx(bits, rel=1e-14)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("context", [b"the", b"zzz", b"he ", b"\xff\x00\xff", b"tzt"])
def test_probabilities_add_up_to_one(order: int, context: bytes) -> None:
    model = ByteModel(array(b"the cat sat on the mat, then the hat"), order)
    head = context[len(context) - (order - 1) :]
    last = [model.probabilities(array(head + bytes([byte]))) for byte in range(256)]
    total = np.concatenate(last)
    assert total.shape == (256,) and (total > 0).all()
    assert total.sum() == pytest.approx(1, rel=1e-12)


def test_the_three_baselines_on_one_text() -> None:
    train = ["the expert reads. " * 50, "naïve"]
    valid = ["the expert", " reads 漢"]
    result = held_out_bits_per_byte(ByteModel(joined(train), 3), joined(valid))
    assert list(result) == ["unigram", "trigram", "xz -9"]
    size = len("the expert reads 漢".encode())
    packed = lzma.compress("the expert reads 漢".encode(), preset=9)
    assert lzma.decompress(packed, format=lzma.FORMAT_XZ).decode() == "the expert reads 漢"
    assert result["xz -9"] == 8 * len(packed) / size
    assert result["trigram"] < result["unigram"] < 8


def test_no_held_out_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no held-out text"):
        held_out_bits_per_byte(ByteModel(joined(["a"]), 3), joined([]))
