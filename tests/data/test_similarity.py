"""From vectors to instances, and the samples that Megatron's GPTDataset builds from them."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data.datasets import Source, build_datasets
from moe_parallel.data.embedding import Documents, HashedTfIdf
from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.similarity import (
    BuildIndex,
    Instances,
    adjacent_cosine,
    computed_once,
    drop_near_duplicates,
    exact_index,
    faiss,
    find_neighbors,
    found_share,
    greedy_order,
    inverted_index,
    lonely_first,
)
from moe_parallel.errors import InputError
from tests.data.hostile import Payload
from tests.data.small_text import NUMBERS
from tests.oracles import similarity as oracle

S = 16
EOD = NUMBERS.eod


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def clustered(clusters: int, each: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centers = np.repeat(rng.normal(size=(clusters, width)), each, axis=0)
    return unit(centers + 0.7 * rng.normal(size=centers.shape))


def find(
    vectors: np.ndarray, k: int, build: BuildIndex | None = None, shard: int = 10**6
) -> tuple[np.ndarray, np.ndarray]:
    neighbors = np.full((len(vectors), k), -7, dtype=np.int64)
    cosines = np.full((len(vectors), k), -7, dtype=np.float32)
    find_neighbors(vectors, build or exact_index, shard, neighbors, cosines)
    return neighbors, cosines


def lists(probes: int) -> BuildIndex:
    return lambda vectors: inverted_index(vectors, probes, seed=0)


def test_neighbors_against_all_pairs() -> None:
    vectors = clustered(10, 12, 16)
    similarity = oracle.cosines(vectors)
    neighbors, cosines = find(vectors, 5)
    assert neighbors.tolist() == oracle.neighbors(similarity, 5)
    assert cosines == pytest.approx(np.take_along_axis(similarity, neighbors, axis=1), abs=1e-5)


@pytest.mark.parametrize("shard", [7, 100, 1500])
def test_bounded_memory_changes_nothing(tmp_path: Path, shard: int) -> None:
    vectors = clustered(40, 30, 24)
    on_disk = np.memmap(tmp_path / "vectors", np.float32, "w+", shape=vectors.shape)
    on_disk[:] = vectors
    whole, whole_cosines = find(vectors, 10)
    parts, parts_cosines = find(on_disk, 10, shard=shard)
    assert np.array_equal(whole, parts)
    assert whole_cosines == pytest.approx(parts_cosines, abs=1e-6)


def test_more_copies_than_neighbors_never_find_themselves() -> None:
    vectors = unit(np.ones((9, 4)))
    for shard in (9, 4):
        neighbors, cosines = find(vectors, 3, shard=shard)
        assert not (neighbors == np.arange(9)[:, None]).any()
        assert (neighbors >= 0).all()
        assert cosines == pytest.approx(1)
        assert all(len(set(row)) == 3 for row in neighbors.tolist())


def test_fewer_documents_than_neighbors() -> None:
    vectors = unit(np.array([[1.0, 0], [1, 1], [1, 2]]))
    neighbors, cosines = find(vectors, 4, shard=2)
    assert neighbors.tolist() == [[1, 2, -1, -1], [2, 0, -1, -1], [1, 0, -1, -1]]
    assert (cosines[:, 2:] == 0).all()


def test_what_shares_nothing_is_no_neighbor() -> None:
    vectors = np.array([[1, 0], [0, 1], [-1, 0], [0, 0], [1, 0]], dtype=np.float32)
    neighbors, _ = find(vectors, 2)
    assert neighbors.tolist() == [[4, -1], [-1, -1], [-1, -1], [-1, -1], [0, -1]]


@pytest.mark.parametrize("shard", [10**6, 1300])
def test_inverted_lists_find_nearly_all(shard: int) -> None:
    vectors = clustered(60, 50, 32)
    exact, _ = find(vectors, 10)
    found, _ = find(vectors, 10, lists(8), shard)
    hits = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), found.tolist(), strict=True)]
    recall = sum(hits) / exact.size
    assert recall > 0.9  # measured: 0.9987 to 1.0 over three seeds
    few, cosines = find(vectors, 10, lists(1), shard)
    assert not np.array_equal(few, exact)  # the approximate index was used
    hits = [len(set(a) & set(b)) for a, b in zip(exact.tolist(), few.tolist(), strict=True)]
    whole = len(vectors)
    share = found_share(vectors, few, cosines, shard=1000, seed=0, sample=whole)
    assert share == pytest.approx(sum(hits) / exact.size, abs=0.001)
    assert found_share(vectors, few, cosines, shard=99999, seed=0) == pytest.approx(share, abs=0.1)


def test_all_that_there_is_counts_as_found() -> None:
    vectors = np.concatenate([unit(np.ones((9, 4))), np.zeros((2, 4), np.float32)])
    neighbors, cosines = find(vectors, 3)  # any three of eight copies are correct
    assert found_share(vectors, neighbors, cosines, shard=7, seed=0) == 1
    neighbors[:, 2] = -1
    assert found_share(vectors, neighbors, cosines, shard=7, seed=0) == pytest.approx(2 / 3)


def test_inverted_lists_of_a_few_documents() -> None:
    vectors = clustered(2, 3, 8)
    assert np.array_equal(find(vectors, 2)[0], find(vectors, 2, lists(4))[0])


def test_without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"needs faiss.*: pip install faiss-cpu$"):
        faiss()


def padded(neighbors: list[list[int]], k: int) -> np.ndarray:
    return np.array([row + [-1] * (k - len(row)) for row in neighbors])


def test_goes_to_the_most_similar_unused_and_begins_anew() -> None:
    #            0       1       2        3        4
    around = [[2, 1], [0, 2], [0, 3], [2, 0], [-1, -1]]
    order, restarts = greedy_order(np.array(around), np.array([0, 4, 1, 2, 3]))
    # 0 -> 2 -> 3 (0 is used); 3's neighbors are used: 4, which has none: 1.
    assert (order.tolist(), restarts) == ([0, 2, 3, 4, 1], 2)


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("seed", range(3))
def test_path_against_all_pairs(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    similarity = oracle.cosines(rng.normal(size=(60, 8)))
    starts = rng.permutation(60)
    order, restarts = greedy_order(padded(oracle.neighbors(similarity, k), k), starts)
    assert (order.tolist(), restarts) == oracle.greedy_order(similarity, k, starts.tolist())


def test_starts_with_those_that_few_name() -> None:
    neighbors = np.array([[1, 2], [2, -1], [1, 3], [1, 2]])  # named 0, 3, 3, 1 times
    for seed in range(5):
        starts = lonely_first(neighbors, seed).tolist()
        assert starts[:2] == [0, 3]
        assert sorted(starts[2:]) == [1, 2]
    assert len({tuple(lonely_first(neighbors, seed)) for seed in range(20)}) == 2


@pytest.mark.parametrize("threshold", [0.2, 0.6, 0.95])
def test_near_duplicates(monkeypatch: pytest.MonkeyPatch, threshold: float) -> None:
    monkeypatch.setattr("moe_parallel.data.similarity._ROWS", 7)
    rng = np.random.default_rng(0)
    vectors = unit(np.repeat(rng.normal(size=(10, 6)), 5, axis=0) + 0.1 * rng.normal(size=(50, 6)))
    order = rng.permutation(50)
    order[:20] = np.sort(order[:20])  # some documents are next to similar ones, some are not
    kept = drop_near_duplicates(order, vectors, threshold)
    similarity = oracle.cosines(vectors)
    assert kept.tolist() == oracle.without_near_duplicates(similarity, order.tolist(), threshold)
    assert 1 < len(kept) < 50


def test_a_run_of_copies_leaves_one() -> None:
    vectors = unit(np.array([[1.0, 0], [1, 0], [1, 0.01], [0, 1], [1, 0]]))
    # The last one is similar to the first three, but is not next to them.
    assert drop_near_duplicates(np.arange(5), vectors, 0.95).tolist() == [0, 3, 4]


def test_documents_without_text_are_no_duplicates() -> None:
    assert drop_near_duplicates(np.arange(3), np.zeros((3, 2), np.float32), 0.95).size == 3


def test_adjacent_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_parallel.data.similarity._ROWS", 2)
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [0, -1]], dtype=np.float32)
    order = np.array([0, 2, 1, 3])  # 0.6, 0.8, -1
    assert adjacent_cosine(order, vectors) == pytest.approx(0.4 / 3)
    assert adjacent_cosine(order, vectors, pairs=1) == pytest.approx(0.6)
    assert np.isnan(adjacent_cosine(order[:1], vectors))


def test_two_thousand_documents_of_forty_kinds(tmp_path: Path) -> None:
    """From tokens to the order: half of a document's words belong to its kind."""
    rng = np.random.default_rng(0)
    words = [rng.choice(1000, 80, replace=False) for _ in range(40)]
    kinds = rng.permutation(np.repeat(np.arange(40), 50))
    bodies = np.where(
        rng.random((2000, 60)) < 0.5,
        np.stack([rng.choice(words[kind], 60) for kind in kinds]),
        rng.integers(0, 1000, (2000, 60)),
    )
    write_indexed(tmp_path / "data", [[*body, 1000] for body in bodies.tolist()], 1001)
    documents = Documents(str(tmp_path / "data"))
    vectors = np.zeros((2000, 512), dtype=np.float32)
    HashedTfIdf(512).embed(documents, vectors, lambda tokens: None)
    neighbors, _ = find(vectors, 10)
    order, _ = greedy_order(neighbors, lonely_first(neighbors, 0))

    def same_kind(order: np.ndarray) -> float:
        return float((kinds[order[1:]] == kinds[order[:-1]]).mean())

    assert sorted(order.tolist()) == list(range(2000))
    assert same_kind(np.arange(2000)) < 0.05  # measured: 0.017; 0.025 is expected
    assert same_kind(order) >= 0.80  # measured: 0.847


class Counter:
    """Fills arrays with the number of times it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: np.ndarray, b: np.ndarray) -> None:
        self.calls += 1
        a[:], b[:] = self.calls, -self.calls


SHAPES = [((2, 3), np.int64), ((4,), np.float32)]


def test_made_once_and_anew_when_anything_differs(tmp_path: Path) -> None:
    make, path = Counter(), tmp_path / "x"
    a, b = computed_once(path, "corpus, 1", SHAPES, make)
    assert (a.tolist(), b.tolist()) == ([[1] * 3] * 2, [-1.0] * 4)
    assert (a.dtype, b.dtype) == (np.int64, np.float32)
    assert computed_once(path, "corpus, 1", SHAPES, make)[0][0, 0] == 1
    assert computed_once(path, "corpus, 2", SHAPES, make)[0][0, 0] == 2
    assert computed_once(path, "corpus, 1", [((2, 4), np.int64), SHAPES[1]], make)[0][0, 0] == 3
    with pytest.raises(ValueError, match="read-only"):
        a[0, 0] = 5


@pytest.mark.parametrize("damage", ["pickle", "objects", "cut", "empty", "other"])
def test_a_damaged_array_is_made_again_and_never_unpickled(tmp_path: Path, damage: str) -> None:
    make, name = Counter(), tmp_path / "work" / "x"
    computed_once(name, "", SHAPES, make)
    path, _ = sorted(name.parent.iterdir())
    payload = Payload(tmp_path / "marker")
    if damage == "pickle":
        path.write_bytes(pickle.dumps(payload))
    elif damage == "objects":
        np.save(path, np.array([payload], dtype=object), allow_pickle=True)
    elif damage == "other":
        np.save(path, np.zeros((3, 2), dtype=np.int64))
    else:
        path.write_bytes(path.read_bytes()[: 140 if damage == "cut" else 0])
    a, b = computed_once(name, "", SHAPES, make)
    assert (a[0, 0], b[0], make.calls) == (2, -2, 2)
    assert not (tmp_path / "marker").exists()


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(*arrays: np.ndarray) -> None:
        arrays[0][:] = 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        computed_once(tmp_path / "x", "", SHAPES, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*of: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        computed_once(tmp_path / "x", "", SHAPES, Counter())
    assert list(tmp_path.iterdir()) == []


def numbered(folder: Path, lengths: list[int]) -> Documents:
    """Every token except the ends is a different number, so its origin is known."""
    ends = np.cumsum(lengths)
    bodies = [list(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
    write_indexed(folder / "in", [[*body, EOD] for body in bodies], NUMBERS.vocab_size)
    return Documents(str(folder / "in"))


def joined(documents: Documents, order: np.ndarray) -> list[int]:
    return [token for i in order for token in documents[i].tolist()]


def samples(prefix: Path, count: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of the samples that training reads."""
    data = build_datasets(
        [Source("data", None, str(prefix), str(prefix), "1,0,0")],
        tokenizer=NUMBERS,
        seq_length=S,
        train_samples=count,
        seed=3,
        cache_folder=prefix.parent / "cache",
    )
    read = [data.train[i] for i in range(count)]
    return [(sample["tokens"].tolist(), sample["labels"].tolist()) for sample in read]


@pytest.mark.parametrize("per_piece", [1, 3, 100])
def test_pieces_are_the_text_in_order(tmp_path: Path, per_piece: int) -> None:
    documents = numbered(tmp_path, [20, 3, 0, 70, 1, 40, 9])
    order = np.array([3, 0, 2, 6, 5, 1])  # document 4 is missing
    text = joined(documents, order)
    pieces = Instances(documents, order, S, per_piece)
    assert (pieces.count, pieces.left_out) == (len(text) // S, len(text) % S)
    found = [pieces[i].tolist() for i in range(len(pieces))]
    assert sum(found, []) == text[: pieces.count * S]
    assert {len(piece) for piece in found[:-1]} <= {S * per_piece}
    assert len(found[-1]) % S == 0


def test_shuffled_is_a_permutation_that_the_seed_gives(tmp_path: Path) -> None:
    pieces = Instances(numbered(tmp_path, [300, 200]), np.array([1, 0]), S, 2)
    first, again, other = (list(pieces.shuffled(seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(first) == sorted(other) == sorted(pieces[i].tolist() for i in range(len(pieces)))


def test_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--seq-length 16 is longer than the text.* 14 tokens"):
        Instances(numbered(tmp_path, [7, 5]), np.array([0, 1]), S, 1)


@pytest.mark.parametrize("per_piece", [1, 4])
def test_every_sample_of_training_is_an_instance(tmp_path: Path, per_piece: int) -> None:
    documents = numbered(tmp_path, [50, 61, 33, 120, 7, 90, 18, 200])
    order = np.array([4, 2, 0, 7, 5, 1, 3, 6])
    pieces = Instances(documents, order, S, per_piece)
    text = joined(documents, order)
    write_indexed(tmp_path / "out", pieces.shuffled(1), NUMBERS.vocab_size)
    number = {tuple(text[i * S : i * S + S]): i for i in range(pieces.count)}
    assert len(number) == pieces.count
    epochs = 3  # the very last sample has no label for its last token and is not built
    read = samples(tmp_path / "out", epochs * pieces.count - 1)
    seen = [number[tuple(tokens)] for tokens, _ in read]
    # Training may complete one epoch's order before the next, so each occurs 2 to 3 times.
    assert sorted(np.bincount(seen, minlength=pieces.count))[0] >= epochs - 1
    assert seen != sorted(seen)
    for instance, (_, labels) in zip(seen, read, strict=True):
        start = instance * S
        assert labels[:-1] == text[start + 1 : start + S]
        last_of_piece = (instance + 1) % per_piece == 0 or instance == pieces.count - 1
        if not last_of_piece:
            assert labels[-1] == text[start + S]


def test_documents_of_one_token_more_would_drift(tmp_path: Path) -> None:
    """The reason that instances are not written with the label of their last token."""
    text = list(range(50 * (S + 1)))
    longer = [text[i : i + S + 1] for i in range(0, len(text), S + 1)]
    write_indexed(tmp_path / "out", longer, NUMBERS.vocab_size)
    whole = {tuple(each[:S]) for each in longer}
    read = samples(tmp_path / "out", 50)
    assert sum(tuple(tokens) in whole for tokens, _ in read) <= 5
