import math
from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.similarity.documents import Documents
from moe_parallel.data.similarity.embedding import embed_all
from moe_parallel.data.similarity.tf_idf import HashedTfIdf
from tests.oracles import similarity as oracle

EOD = 99


def corpus(folder: Path, bodies: list[list[int]]) -> Documents:
    write_indexed(folder / "data", [[*body, EOD] for body in bodies], 100)
    return Documents(str(folder / "data"))


def fitted(documents: Documents, size: int, orders: int) -> HashedTfIdf:
    embedder = HashedTfIdf(size, orders=orders)
    embedder.fit(documents, lambda tokens: None)
    return embedder


def embeddings(documents: Documents, embedder: HashedTfIdf) -> np.ndarray:
    out = np.zeros((len(documents), embedder.size), dtype=np.float32)
    embed_all(documents, embedder, out, lambda tokens: None)
    return out


def test_worked_by_hand(tmp_path: Path) -> None:
    # Token 1 is in 2 of 3 documents, token 2 in all, token 3 in one.
    documents = corpus(tmp_path, [[1, 1, 2], [2, 3], [2, 1]])
    rare, common, everywhere = math.log(4), math.log(4 / 2), math.log(4 / 3)
    twice = 1 + math.log(2)
    entries = fitted(documents, 4096, 1).weights([documents.body(i) for i in range(3)])
    found = [sorted(entries.values[entries.rows == row]) for row in range(3)]
    assert found[0] == pytest.approx([everywhere, twice * common])  # 0.28768, 1.17360
    assert found[1] == pytest.approx([everywhere, rare])  # 0.28768, 1.38629
    assert found[2] == pytest.approx([everywhere, common])  # 0.28768, 0.69315
    # By hand: (1.17360 * 0.69315 + 0.28768^2) / (1.20835 * 0.75048) = 0.98831, and so on. Four
    # n-grams do not collide in 4096 places, so the projection changes nothing.
    vectors = embeddings(documents, HashedTfIdf(4096, orders=1))
    # Only document 1 contains token 3: its vector keeps 0.28768 of 1.41583 in length.
    expected = [[1, 0.04837, 0.98831], [0.04837, 0.04129, 0.07789], [0.98831, 0.07789, 1]]
    assert vectors @ vectors.T == pytest.approx(np.array(expected), abs=1e-5)


def test_bigrams_stay_inside_a_document_and_have_a_direction(tmp_path: Path) -> None:
    documents = corpus(tmp_path, [[1, 2], [3], [2, 1]])
    entries = fitted(documents, 64, 2).weights([documents.body(i) for i in range(3)])
    columns = [set(entries.columns[entries.rows == row].tolist()) for row in range(3)]
    assert [len(each) for each in columns] == [3, 1, 3]  # 1 2 12, 3, 2 1 21
    assert len(columns[0] & columns[2]) == 2
    assert not columns[1] & (columns[0] | columns[2])


@pytest.mark.parametrize("orders", [1, 2, 3])
def test_the_projection_keeps_cosines(tmp_path: Path, orders: int) -> None:
    rng = np.random.default_rng(orders)
    bodies = [rng.integers(0, 12, size=rng.integers(1, 40)).tolist() for _ in range(30)]
    bodies[7] = bodies[3]
    vectors = embeddings(corpus(tmp_path, bodies), HashedTfIdf(4096, orders=orders))
    expected = oracle.tf_idf_cosines(bodies, orders)
    others = ~np.eye(len(bodies), dtype=bool)
    error = np.abs(vectors @ vectors.T - expected)[others]
    assert error.max() < 6 / math.sqrt(4096)
    assert np.sqrt((error**2).mean()) < 1 / math.sqrt(4096)
    assert float(vectors[7] @ vectors[3]) == pytest.approx(1)


def test_vectors_do_not_depend_on_who_is_embedded_beside(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = corpus(tmp_path, [rng.integers(0, 50, size=30).tolist() for _ in range(20)])
    together, apart = HashedTfIdf(64), HashedTfIdf(64)
    apart.batch = 3
    assert np.array_equal(embeddings(documents, together), embeddings(documents, apart))


def test_length_is_what_is_shared(tmp_path: Path) -> None:
    vectors = embeddings(corpus(tmp_path, [[1, 2], [2, 1], [], [4], [1, 5]]), HashedTfIdf(32))
    both = math.log(6 / 3)  # token 1 is in 3 of 5 documents, token 5 in one
    last = both / math.hypot(both, math.log(6))
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 0, 0, last])


def test_what_stands_in_one_document_adds_no_error(tmp_path: Path) -> None:
    """Nearly all n-grams of two documents are in no other document; there are few dimensions."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(90)
    bodies = [[*ids[:40].tolist(), 95], [*ids[40:80].tolist(), 95]]
    vectors = embeddings(corpus(tmp_path, bodies), HashedTfIdf(16))
    expected = oracle.tf_idf_cosines(bodies, 1)[0, 1]
    assert float(vectors[0] @ vectors[1]) == pytest.approx(expected, abs=1e-6)
    assert 0 < expected < 0.01


def test_equal_documents_are_similar_even_when_there_is_nothing_else(tmp_path: Path) -> None:
    vectors = embeddings(corpus(tmp_path, [[1, 2, 3]] * 4), HashedTfIdf(32))
    assert vectors @ vectors.T == pytest.approx(np.ones((4, 4)))


def test_another_seed_is_another_projection(tmp_path: Path) -> None:
    documents = corpus(tmp_path, [[1, 2, 3], [2, 3, 4]])
    a, b = (embeddings(documents, HashedTfIdf(64, seed=seed)) for seed in (0, 1))
    assert not np.allclose(np.abs(a), np.abs(b))
