"""Held-out documents are those of the validation datasets, once each."""

from pathlib import Path

import pytest

from moe_parallel.data.datasets import (
    Source,
    blend_sources,
    build_datasets,
    held_out_documents,
    texts,
)
from moe_parallel.errors import InputError
from tests.data.small_text import NUMBERS, small_bpe, words, write_numbers, write_texts


def test_the_documents_of_a_file_for_validation(tmp_path: Path) -> None:
    train, valid = (
        write_numbers(tmp_path / name, sizes) for name, sizes in (("t", [50]), ("v", [3, 1, 4]))
    )
    source = Source("domain", None, train, valid, None)
    assert list(held_out_documents(source, NUMBERS)) == [[0, 1, 2], [3], [4, 5, 6, 7]]


@pytest.mark.parametrize("split", ["8,2,0", "6,3,1", "1,1,0"])
def test_the_validation_part_of_a_file(tmp_path: Path, split: str) -> None:
    tokenizer = small_bpe()
    write_texts(tmp_path / "a", [words(30, seed) for seed in range(11)], tokenizer)
    sources = blend_sources([str(tmp_path / "a")], split)
    datasets = build_datasets(
        sources, tokenizer=tokenizer, seq_length=8, train_samples=4, seed=1,
        cache_folder=tmp_path / "cache",
    )  # fmt: skip
    expected = list(texts(datasets.valid["a"], tokenizer))
    documents = held_out_documents(sources[0], tokenizer)
    assert [tokenizer.detokenize(each) for each in documents] == expected
    assert len(expected) > 1


def test_no_validation(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a", [5, 5])
    (source,) = blend_sources([str(tmp_path / "a")], "1,0,0")
    assert list(held_out_documents(source, NUMBERS)) == []


def test_files_are_checked_as_training_checks_them(tmp_path: Path) -> None:
    write_texts(tmp_path / "a", [words(30, seed) for seed in range(4)], small_bpe())
    (source,) = blend_sources([str(tmp_path / "a")], "1,1,0")
    with pytest.raises(InputError, match="a was written with another tokenizer than this run's"):
        list(held_out_documents(source, NUMBERS))
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"12")
    with pytest.raises(InputError, match="a.bin has .* bytes but its index describes"):
        list(held_out_documents(source, small_bpe()))
    (tmp_path / "a.bin").unlink()
    with pytest.raises(InputError, match="a.bin is missing"):
        list(held_out_documents(source, small_bpe()))
