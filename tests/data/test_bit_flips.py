"""A flipped bit in a data file gives a one-line error or exactly the data of the intact file.

Sealed files, and indices that are compared with one, are in test_sealed.py and test_datasets.py.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from moe_parallel.data.indexed import check_indexed, manifest_path, write_indexed
from moe_parallel.data.tokenizer import load_tokenizer
from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe, words

pytestmark = pytest.mark.full

DOCUMENTS = [list(range(first, first + length)) for first, length in ((3, 9), (20, 1), (7, 30))]


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Inside the context one bit of the file is flipped."""
    whole = path.read_bytes()
    content = bytearray(whole)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def bits(path: Path, most: int) -> Iterable[int]:
    """All bits of a file, or as many random ones as `most` allows."""
    count = 8 * path.stat().st_size
    return random.Random(0).sample(range(count), min(most, count))


def test_of_an_index_and_its_data(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 100)
    for suffix, most in ((".idx", 2000), (".bin", 300)):
        for bit in bits(Path(f"{prefix}{suffix}"), most):
            Path(f"{prefix}.range.json").unlink(missing_ok=True)
            with flipped(Path(f"{prefix}{suffix}"), bit), pytest.raises(InputError) as told:
                check_indexed(str(prefix), 100)
            assert "\n" not in str(told.value)
    Path(f"{prefix}.range.json").unlink(missing_ok=True)
    assert len(check_indexed(str(prefix), 100)) == 3


def test_of_an_index_without_a_manifest(tmp_path: Path) -> None:
    """Megatron's own files are read as the same documents, or rejected."""
    prefix = tmp_path / "data"
    write_indexed(prefix, DOCUMENTS, 100)
    manifest_path(prefix).unlink()
    for bit in bits(Path(f"{prefix}.idx"), 2000):
        with flipped(Path(f"{prefix}.idx"), bit):
            try:
                check_indexed(str(prefix), 100)
            except InputError as error:
                assert "\n" not in str(error)
            else:
                dataset = IndexedDataset(str(prefix))
                assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS, bit


def test_of_a_tokenizer(tmp_path: Path) -> None:
    bpe = small_bpe()
    bpe.save(tmp_path)
    text = words(60, seed=5)
    for name, most in (("tokenizer.json", 3000), ("tokenizer_config.json", 3000)):
        for bit in bits(tmp_path / name, most):
            with flipped(tmp_path / name, bit):
                try:
                    found = load_tokenizer(tmp_path)
                except InputError as error:
                    assert "\n" not in str(error)
                    continue
                if found.fingerprint == bpe.fingerprint:  # runs and data are compared by it
                    assert (found.tokenize(text), found.eod) == (bpe.tokenize(text), bpe.eod)
