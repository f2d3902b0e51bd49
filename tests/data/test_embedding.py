"""Documents and their vectors. The encoder: pooling and limits with a stand-in for transformers,
loading with the real one."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_parallel.data.embedding import Documents, HashedTfIdf, HuggingFaceEncoder
from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.tokenizer import NullTokenizer
from moe_parallel.errors import InputError
from tests.data.hostile import Payload, hostile_folder
from tests.oracles import similarity as oracle

EOD = 99
WIDTH = 5
TABLE = torch.from_numpy(np.random.default_rng(0).normal(size=(40, WIDTH)))
CLS, PAD = 38, 39


def written(folder: Path, *documents: list[int], vocab_size: int = 1000) -> str:
    write_indexed(folder / "data", documents, vocab_size)
    return str(folder / "data")


def test_a_document_with_and_without_its_end(tmp_path: Path) -> None:
    documents = Documents(written(tmp_path, [5, 6, 9], [9], [7, 9, 9]))
    assert (len(documents), documents.eod) == (3, 9)
    assert [documents[i].tolist() for i in range(3)] == [[5, 6, 9], [9], [7, 9, 9]]
    assert [documents.body(i).tolist() for i in range(3)] == [[5, 6], [], [7, 9]]
    assert documents.lengths.tolist() == [3, 1, 3]


def test_ids_of_a_large_vocabulary(tmp_path: Path) -> None:
    documents = Documents(written(tmp_path, [5, 90_000], [70_000, 90_000], vocab_size=100_000))
    assert documents.body(1).tolist() == [70_000]
    assert (documents.eod, documents.largest_id) == (90_000, 90_000)


def test_an_end_is_added_where_there_is_none(tmp_path: Path) -> None:
    documents = Documents(written(tmp_path, [5, 6], [7, 900], [8]), eod=900)
    assert [documents[i].tolist() for i in range(3)] == [[5, 6, 900], [7, 900], [8, 900]]
    assert documents.lengths.tolist() == [3, 2, 2]
    assert documents.largest_id == 900


def test_an_end_that_is_no_token_of_the_file_counts_as_its_largest(tmp_path: Path) -> None:
    assert Documents(written(tmp_path, [5, 6], [7, 8]), eod=999).largest_id == 999


def test_documents_that_end_differently_need_an_end(tmp_path: Path) -> None:
    prefix = written(tmp_path, [5, 6], [7, 8])
    with pytest.raises(InputError, match=r"end with 2 different tokens.* --eod-id"):
        Documents(prefix)


def test_spans_cover_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_parallel.data.embedding._SPAN_TOKENS", 10)
    lengths = [4, 4, 4, 25, 1, 1, 1, 1, 1]
    documents = Documents(written(tmp_path, *([1] * (n - 1) + [2] for n in lengths)))
    spans = list(documents.spans(most=3))
    places = [(where.start, where.stop) for where, _ in spans]
    assert places == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 9)]
    assert [len(body) for _, bodies in spans for body in bodies] == [n - 1 for n in lengths]
    assert np.array_equal(documents.lengths, lengths)


def corpus(folder: Path, bodies: list[list[int]]) -> Documents:
    write_indexed(folder / "data", [[*body, EOD] for body in bodies], 100)
    return Documents(str(folder / "data"))


def embeddings(documents: Documents, embedder: HashedTfIdf | HuggingFaceEncoder) -> np.ndarray:
    out = np.zeros((len(documents), embedder.size), dtype=np.float32)
    embedder.embed(documents, out, lambda tokens: None)
    return out


def test_worked_by_hand(tmp_path: Path) -> None:
    # Token 1 is in 2 of 3 documents, token 2 in all, token 3 in one.
    documents = corpus(tmp_path, [[1, 1, 2], [2, 3], [2, 1]])
    # Weights: 0.28768 and 1.17360; 0.28768 and 1.38629; 0.28768 and 0.69315.
    # By hand: (1.17360 * 0.69315 + 0.28768^2) / (1.20835 * 0.75048) = 0.98831, and so on. Four
    # n-grams do not collide in 4096 places, so the projection changes nothing.
    vectors = embeddings(documents, HashedTfIdf(4096, orders=1))
    # Only document 1 contains token 3: its vector keeps 0.28768 of 1.41583 in length.
    expected = [[1, 0.04837, 0.98831], [0.04837, 0.04129, 0.07789], [0.98831, 0.07789, 1]]
    assert vectors @ vectors.T == pytest.approx(np.array(expected), abs=1e-5)


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


class Inputs(dict[str, torch.Tensor]):
    """The return value of a tokenizer of transformers."""

    def to(self, device: torch.device) -> "Inputs":
        return self


class Words:
    """A tokenizer: a special token, then the numbers in the text."""

    model_max_length = 10**30  # the value in transformers if no limit was set

    def __call__(self, texts: list[str], *, max_length: int, **how: Any) -> Inputs:
        assert how == {"padding": True, "truncation": True, "return_tensors": "pt"}
        ids = [[CLS, *map(int, text.split())][:max_length] for text in texts]
        width = max(map(len, ids))
        filled = [each + [PAD] * (width - len(each)) for each in ids]
        mask = [[1] * len(each) + [0] * (width - len(each)) for each in ids]
        return Inputs(input_ids=torch.tensor(filled), attention_mask=torch.tensor(mask))


class Lookup(torch.nn.Module):
    """An encoder that is a lookup table."""

    config = SimpleNamespace(hidden_size=WIDTH, max_position_embeddings=6)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=TABLE[input_ids].float())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, **how: Words()),
        AutoModel=SimpleNamespace(from_pretrained=lambda name, **how: Lookup()),
    )
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setattr("moe_parallel.data.embedding.ask_hub", lambda name, file: None)


def test_the_mean_over_tokens_without_the_filling(stand_in: None, tmp_path: Path) -> None:
    encoder = HuggingFaceEncoder("any", NullTokenizer(30), batch=4)
    bodies = [[3, 1], [4, 1, 5, 9, 2, 6, 5], [], [7]]
    found = embeddings(corpus(tmp_path, bodies), encoder)
    assert (encoder.size, found.shape, found.dtype) == (WIDTH, (4, WIDTH), np.float32)
    for body, vector in zip(bodies, found, strict=True):
        if not body:
            assert (vector == 0).all()
            continue
        read = [CLS, *body][:6]  # up to the number of positions of the encoder
        mean = sum(TABLE[i].numpy() for i in read) / len(read)
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)


def test_no_such_encoder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **how: object) -> None:
        raise OSError(f"{name} is not a folder\nand much more")

    library = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=fail))
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setattr("moe_parallel.data.embedding.ask_hub", lambda name, file: None)
    expected = (
        r"^--encoder no/such is not an encoder .*\(no/such is not a folder\); give its folder"
    )
    with pytest.raises(InputError, match=expected) as told:
        HuggingFaceEncoder("no/such", NullTokenizer(9))
    assert "\n" not in str(told.value)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    remedy = "pip install 'transformers>=5.23'"
    with pytest.raises(InputError, match=rf"--encoder x needs .*: {remedy}$"):
        HuggingFaceEncoder("x", NullTokenizer(9))


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers, an optional library, is not installed"
    )
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(30))]
    (tmp_path / "vocab.txt").write_text("\n".join(names) + "\n")
    to_ids = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    to_ids.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path)
    encoder = HuggingFaceEncoder(str(tmp_path), NullTokenizer(30))
    bodies = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
    found = embeddings(corpus(tmp_path, bodies), encoder)
    for body, vector in zip(bodies, found, strict=True):  # one at a time, so nothing is padded
        ids = torch.tensor([[2, *(5 + i for i in body), 3]])
        with torch.no_grad():
            mean = model(input_ids=ids).last_hidden_state[0].mean(0).numpy()
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers, an optional library, is missing")
    monkeypatch.setattr("builtins.input", lambda *of: pytest.fail("asked"))
    folder = hostile_folder(tmp_path)
    with pytest.raises(InputError, match=r"without running code of its own \(.*\); give") as told:
        HuggingFaceEncoder(str(folder), NullTokenizer(9))
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()


def test_a_pickle_in_the_place_of_weights_is_not_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers, an optional library, is not installed"
    )
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    transformers.BertConfig(hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    torch.save({"weights": Payload(tmp_path / "marker")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="--encoder .* is not an encoder") as told:
        HuggingFaceEncoder(str(tmp_path), NullTokenizer(9))
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()
