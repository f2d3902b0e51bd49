"""Vectors, neighbors, the path, instances, and the samples that Megatron's GPTDataset makes of
them.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_parallel.data.datasets import Source, build_datasets
from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.similarity import (
    Documents,
    Instances,
    adjacent_cosine,
    build_index,
    drop_near_duplicates,
    encoded,
    find_neighbors,
    found_share,
    greedy_order,
    lonely_first,
    tf_idf,
)
from moe_parallel.data.tokenizer import NullTokenizer
from moe_parallel.errors import InputError
from tests.data.hostile import Payload, hostile_folder
from tests.data.small_text import NUMBERS
from tests.oracles import similarity as oracle

S = 16
EOD = NUMBERS.eod


def nothing(count: int) -> None:
    """No progress is shown."""


def written(folder: Path, *documents: list[int], vocab_size: int = 1000) -> str:
    write_indexed(folder / "data", documents, vocab_size)
    return str(folder / "data")


def corpus(folder: Path, bodies: list[list[int]], end: int = 99) -> Documents:
    return Documents(written(folder, *([*body, end] for body in bodies)))


def test_documents_with_and_without_their_end(tmp_path: Path) -> None:
    documents = Documents(written(tmp_path, [5, 6, 9], [9], [7, 9, 9]))
    assert (len(documents), documents.eod, documents.largest_id) == (3, 9, 9)
    assert [documents[i].tolist() for i in range(3)] == [[5, 6, 9], [9], [7, 9, 9]]
    assert [documents.body(i).tolist() for i in range(3)] == [[5, 6], [], [7, 9]]
    assert documents.lengths.tolist() == [3, 1, 3]
    added = Documents(written(tmp_path, [5, 6], [7, 90_000], [8], vocab_size=10**5), eod=90_000)
    assert [added[i].tolist() for i in range(3)] == [[5, 6, 90_000], [7, 90_000], [8, 90_000]]
    assert (added.lengths.tolist(), added.largest_id) == ([3, 2, 2], 90_000)
    prefix = written(tmp_path, [5, 6], [7, 8])
    with pytest.raises(InputError, match=r"end with 2 different tokens.* --eod-id"):
        Documents(prefix)
    assert Documents(prefix, eod=999).largest_id == 999


def test_spans_are_short_and_cover_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_parallel.data.similarity._SPAN_TOKENS", 10)
    lengths = [4, 6, 10, 30, 1, 2, 3, 1, 1]
    documents = Documents(written(tmp_path, *([1] * (n - 1) + [9] for n in lengths)))
    spans = list(documents.spans(3))
    places = [(where.start, where.stop) for where, _ in spans]
    assert places == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 9)]
    assert [len(body) for _, bodies in spans for body in bodies] == [n - 1 for n in lengths]


def test_the_projection_keeps_the_cosines_of_tf_idf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    bodies = [rng.integers(0, 12, size=rng.integers(1, 40)).tolist() for _ in range(30)]
    bodies[7] = bodies[3]
    documents = corpus(tmp_path, bodies)
    vectors = tf_idf(documents, 4096, 0, nothing)
    error = np.abs(vectors @ vectors.T - oracle.tf_idf_cosines(bodies))
    assert error.max() < 5 / math.sqrt(4096) and np.sqrt((error**2).mean()) < 1 / math.sqrt(4096)
    assert float(vectors[7] @ vectors[3]) == pytest.approx(1)
    other = tf_idf(documents, 4096, 1, nothing)
    assert not np.allclose(np.abs(vectors), np.abs(other))
    monkeypatch.setattr("moe_parallel.data.similarity._SPAN", 4)
    assert np.array_equal(tf_idf(documents, 4096, 0, nothing), vectors)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def clustered(clusters: int, each: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    centers = np.repeat(rng.normal(size=(clusters, width)), each, axis=0)
    return unit(centers + 0.7 * rng.normal(size=centers.shape))


def find(vectors: np.ndarray, k: int, probes: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    return find_neighbors(vectors, build_index(vectors, probes, 0), k)


def test_neighbors_against_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_parallel.data.similarity._QUERIES", 50)
    vectors = clustered(10, 12, 16)
    similarity = oracle.cosines(vectors)
    neighbors, cosines = find(vectors, 5)
    assert neighbors.tolist() == oracle.neighbors(similarity, 5)
    assert cosines == pytest.approx(np.take_along_axis(similarity, neighbors, axis=1), abs=1e-5)


def test_neighbors_of_copies_and_of_few() -> None:
    neighbors, cosines = find(unit(np.ones((9, 4))), 3)
    assert not (neighbors == np.arange(9)[:, None]).any() and (neighbors >= 0).all()
    assert cosines == pytest.approx(1)
    assert all(len(set(row)) == 3 for row in neighbors.tolist())
    neighbors, cosines = find(unit(np.array([[1.0, 0], [1, 1], [1, 2]])), 4)
    assert neighbors.tolist() == [[1, 2, -1, -1], [2, 0, -1, -1], [1, 0, -1, -1]]
    assert (cosines[:, 2:] == 0).all()
    apart = np.array([[1, 0], [0, 1], [-1, 0], [0, 0], [1, 0]], dtype=np.float32)
    assert find(apart, 2)[0].tolist() == [[4, -1], [-1, -1], [-1, -1], [-1, -1], [0, -1]]
    few = clustered(2, 3, 8)
    assert np.array_equal(find(few, 2)[0], find(few, 2, probes=4)[0])


def test_inverted_lists_find_nearly_all() -> None:
    vectors = clustered(60, 50, 32)
    exact, _ = find(vectors, 10)

    def recall(found: np.ndarray) -> float:
        pairs = zip(exact.tolist(), found.tolist(), strict=True)
        return sum(len(set(a) & set(b)) for a, b in pairs) / exact.size

    assert recall(find(vectors, 10, probes=8)[0]) > 0.9
    few, cosines = find(vectors, 10, probes=1)
    assert recall(few) < 1  # the approximate index was used
    share = found_share(vectors, few, cosines, seed=0, sample=len(vectors))
    assert share == pytest.approx(recall(few), abs=0.001)
    assert found_share(vectors, few, cosines, seed=0) == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_path_against_all_pairs(k: int) -> None:
    rng = np.random.default_rng(k)
    similarity = oracle.cosines(rng.normal(size=(60, 8)))
    starts = rng.permutation(60)
    around = np.array([row + [-1] * (k - len(row)) for row in oracle.neighbors(similarity, k)])
    order, restarts = greedy_order(around, starts)
    assert (order.tolist(), restarts) == oracle.greedy_order(similarity, k, starts.tolist())


def test_starts_with_those_that_few_name() -> None:
    neighbors = np.array([[1, 2], [2, -1], [1, 3], [1, 2]])  # named 0, 3, 3, 1 times
    for seed in range(5):
        starts = lonely_first(neighbors, seed).tolist()
        assert starts[:2] == [0, 3] and sorted(starts[2:]) == [1, 2]
    assert len({tuple(lonely_first(neighbors, seed)) for seed in range(20)}) == 2


@pytest.mark.parametrize("threshold", [0.2, 0.6, 0.95])
def test_near_duplicates(threshold: float) -> None:
    rng = np.random.default_rng(0)
    vectors = unit(np.repeat(rng.normal(size=(10, 6)), 5, axis=0) + 0.1 * rng.normal(size=(50, 6)))
    order = rng.permutation(50)
    order[:20] = np.sort(order[:20])  # some documents are next to similar ones, some are not
    kept = drop_near_duplicates(order, vectors, threshold)
    similarity = oracle.cosines(vectors)
    assert kept.tolist() == oracle.without_near_duplicates(similarity, order.tolist(), threshold)
    assert 1 < len(kept) < 50
    assert drop_near_duplicates(np.arange(3), np.zeros((3, 2), np.float32), 0.95).size == 3


def test_adjacent_cosine() -> None:
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [0, -1]], dtype=np.float32)
    order = np.array([0, 2, 1, 3])  # 0.6, 0.8, -1
    assert adjacent_cosine(order, vectors) == pytest.approx(0.4 / 3)
    assert adjacent_cosine(order, vectors, pairs=1) == pytest.approx(0.6)
    assert np.isnan(adjacent_cosine(order[:1], vectors))


def numbered(folder: Path, lengths: list[int]) -> Documents:
    """Every token except the ends is a different number, so its origin is known."""
    ends = np.cumsum(lengths)
    bodies = [list(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
    return corpus(folder, bodies, EOD)


@pytest.mark.parametrize("per_piece", [1, 3, 100])
def test_pieces_are_the_text_in_order(tmp_path: Path, per_piece: int) -> None:
    documents = numbered(tmp_path, [20, 3, 0, 70, 1, 40, 9])
    order = np.array([3, 0, 2, 6, 5, 1])  # document 4 is missing
    text = [token for i in order for token in documents[i].tolist()]
    pieces = Instances(documents, order, S, per_piece)
    assert (pieces.count, pieces.left_out) == (len(text) // S, len(text) % S)
    used = text[: pieces.count * S]
    expected = [used[i : i + S * per_piece] for i in range(0, len(used), S * per_piece)]
    first, again, other = (list(pieces.shuffled(seed)) for seed in (0, 0, 1))
    assert first == again and (first != other or per_piece == 100)
    assert sorted(first) == sorted(other) == sorted(expected)
    with pytest.raises(InputError, match=r"--seq-length 16 is longer than the text.* 4 tokens"):
        Instances(documents, np.array([1]), S, 1)


@pytest.mark.parametrize("per_piece", [1, 4])
def test_every_sample_of_training_is_an_instance(tmp_path: Path, per_piece: int) -> None:
    documents = numbered(tmp_path, [50, 61, 33, 120, 7, 90, 18, 200])
    order = np.array([4, 2, 0, 7, 5, 1, 3, 6])
    pieces = Instances(documents, order, S, per_piece)
    text = [token for i in order for token in documents[i].tolist()]
    prefix = str(tmp_path / "out")
    write_indexed(Path(prefix), pieces.shuffled(1), NUMBERS.vocab_size)
    number = {tuple(text[i * S : i * S + S]): i for i in range(pieces.count)}
    assert len(number) == pieces.count
    count = 3 * pieces.count - 1  # the very last sample of three epochs has no last label
    data = build_datasets(
        [Source("data", None, prefix, prefix, "1,0,0")],
        tokenizer=NUMBERS,
        seq_length=S,
        train_samples=count,
        seed=3,
        cache_folder=tmp_path / "cache",
    )
    read = [data.train[i] for i in range(count)]
    seen = [number[tuple(sample["tokens"].tolist())] for sample in read]
    # Training may complete one epoch's order before the next, so each occurs 2 to 3 times.
    assert min(np.bincount(seen, minlength=pieces.count)) >= 2 and seen != sorted(seen)
    for instance, sample in zip(seen, read, strict=True):
        labels, start = sample["labels"].tolist(), instance * S
        assert labels[:-1] == text[start + 1 : start + S]
        last_of_piece = (instance + 1) % per_piece == 0 or instance == pieces.count - 1
        if not last_of_piece:
            assert labels[-1] == text[start + S]


def test_an_encoder_that_transformers_wrote(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers, an optional library, is not installed"
    )
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(30))]
    (tmp_path / "vocab.txt").write_text("\n".join(names) + "\n")
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path)
    bodies = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [i % 30 for i in range(50)], []]
    documents = corpus(tmp_path, bodies)
    found = encoded(str(tmp_path), NullTokenizer(30), documents, nothing)
    assert (found.shape, found.dtype) == ((4, 16), np.float32) and not found[3].any()
    for body, vector in zip(bodies[:3], found, strict=False):  # one at a time, nothing is padded
        ids = torch.tensor([[2, *(5 + i for i in body[:30]), 3]])  # up to the encoder's limit
        with torch.no_grad():
            mean = model(input_ids=ids).last_hidden_state[0].mean(0).numpy()
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    # A pickle in the place of the weights is not run.
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weights": Payload(tmp_path / "marker")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="--encoder .* is not an encoder") as told:
        encoded(str(tmp_path), NullTokenizer(9), documents, nothing)
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()


def test_code_of_an_encoder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers, an optional library, is missing")
    monkeypatch.setattr("builtins.input", lambda *of: pytest.fail("asked"))
    folder, documents = hostile_folder(tmp_path), corpus(tmp_path, [[1]])
    with pytest.raises(InputError, match=r"without running code of its own \(.*\); give") as told:
        encoded(str(folder), NullTokenizer(9), documents, nothing)
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()
    for module in ("transformers", "faiss", "scipy.sparse"):
        monkeypatch.setitem(sys.modules, module, None)
    for compute in (
        lambda: encoded("x", NullTokenizer(9), documents, nothing),
        lambda: tf_idf(documents, 8, 0, nothing),
        lambda: build_index(np.ones((2, 2), np.float32), None, 0),
    ):
        with pytest.raises(InputError, match=r"needs (transformers|scipy|faiss), .*: pip install"):
            compute()
