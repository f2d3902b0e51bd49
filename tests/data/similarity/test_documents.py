from pathlib import Path

import numpy as np
import pytest

from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.similarity.documents import Documents
from moe_parallel.errors import InputError


def written(folder: Path, *documents: list[int], vocab_size: int = 1000) -> str:
    write_indexed(folder / "data", documents, vocab_size)
    return str(folder / "data")


def test_a_document_with_and_without_its_end(tmp_path: Path) -> None:
    documents = Documents(written(tmp_path, [5, 6, 9], [9], [7, 9, 9]))
    assert (len(documents), documents.eod, documents.tokens) == (3, 9, 7)
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
    assert (documents.lengths.tolist(), documents.tokens) == ([3, 2, 2], 7)
    assert documents.largest_id == 900


def test_an_end_that_is_no_token_of_the_file_counts_as_its_largest(tmp_path: Path) -> None:
    assert Documents(written(tmp_path, [5, 6], [7, 8]), eod=999).largest_id == 999


def test_documents_that_end_differently_need_an_end(tmp_path: Path) -> None:
    prefix = written(tmp_path, [5, 6], [7, 8])
    with pytest.raises(InputError, match=r"end with 2 different tokens.* --eod-id"):
        Documents(prefix)


def test_spans_cover_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_parallel.data.similarity.documents._SPAN_TOKENS", 10)
    lengths = [4, 4, 4, 25, 1, 1, 1, 1, 1]
    documents = Documents(written(tmp_path, *([1] * (n - 1) + [2] for n in lengths)))
    spans = list(documents.spans(most=3))
    assert [list(span) for span in spans] == [[0, 1], [2], [3], [4, 5, 6], [7, 8]]
    assert np.array_equal(documents.lengths, lengths)
