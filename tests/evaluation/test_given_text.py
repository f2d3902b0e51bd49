"""Text files as batches: every token once, in order."""

import json

import pytest

from moe_parallel.data.tokenizer import NullTokenizer
from moe_parallel.errors import InputError
from moe_parallel.evaluation.given_text import sequences_of, text_batches

TOKENIZER = NullTokenizer(100)  # a text is numbers; 99 ends a document
END = 99


def test_documents_follow_one_another(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("1 2 3", "", "4 5")))
    expected = [[1, 2, 3, END], [END, 4, 5, END]]
    assert list(sequences_of(file, TOKENIZER, 4)) == expected
    assert list(sequences_of(file, TOKENIZER, 5)) == [[1, 2, 3, END, END], [4, 5, END]]


def test_batches_are_filled_and_masked(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("1 2 3 4 5 6 7 8")
    one, two = text_batches(file, TOKENIZER, 3, 2)
    assert one["tokens"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert one["loss_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert two["tokens"].tolist() == [[7, 8, END], [END, END, END]]
    assert two["loss_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert two["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert len(list(text_batches(file, TOKENIZER, 3, 2, samples=2))) == 1
    (only,) = text_batches(file, TOKENIZER, 3, 2, samples=1)
    assert only["loss_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"1 2 \xe9")
    (tmp_path / "words.txt").write_text("no numbers")
    for name, message in [
        ("latin.txt", "--text .*latin.txt is not UTF-8: convert it"),
        ("gone.txt", "--text .*gone.txt cannot be read"),
        ("words.txt", "NullTokenizer reads numbers"),
    ]:
        with pytest.raises(InputError, match=message):
            list(sequences_of(tmp_path / name, TOKENIZER, 4))
