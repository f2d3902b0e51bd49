"""The files are those of Megatron's own builder."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from moe_parallel.data import indexed_writer
from moe_parallel.data.indexed import check_indexed
from moe_parallel.data.indexed_writer import IndexedWriter, id_type, write_indexed
from moe_parallel.data.manifest import Size, SourceFile, read_manifest
from moe_parallel.errors import InputError


@pytest.mark.parametrize("vocab_size", [2, 65_499, 65_500, 200_000])
@pytest.mark.parametrize("span", [1, 7, 2**18])
def test_megatron_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, span: int
) -> None:
    monkeypatch.setattr(indexed_writer, "_SPAN", span)
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocab_size, n).tolist() for n in (3, 1, 50, 7, 2, 2, 1, 19)]
    builder = IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size)
    )
    for ids in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_indexed(tmp_path / "ours", documents, vocab_size)
    for suffix in ("bin", "idx"):
        theirs = (tmp_path / f"theirs.{suffix}").read_bytes()
        assert (tmp_path / f"ours.{suffix}").read_bytes() == theirs


def test_several_documents_are_added_at_once(tmp_path: Path) -> None:
    sources = [SourceFile("a.jsonl", 3, "abc")]
    with IndexedWriter(tmp_path / "some", 9) as writer:
        for lengths, ids in (([2, 1], [1, 2, 3]), ([], []), ([4], [4, 5, 6, 7])):
            writer.add(np.array(lengths, np.int32), np.array(ids, np.uint16))
        writer.finish(tokenizer="t", seq_length=5, sources=sources, domains={"a": Size(3, 7)})
    manifest = read_manifest(tmp_path / "some")
    assert manifest is not None
    write_indexed(
        tmp_path / "one", [[1, 2], [3], [4, 5, 6, 7]], 9,
        tokenizer="t", seq_length=5, sources=sources,
    )  # fmt: skip
    for suffix in ("bin", "idx"):
        one = (tmp_path / f"one.{suffix}").read_bytes()
        assert (tmp_path / f"some.{suffix}").read_bytes() == one
    assert check_indexed(str(tmp_path / "some"), 9).tolist() == [2, 1, 4]
    assert (manifest.sources, manifest.domains) == (tuple(sources), {"a": Size(3, 7)})
    assert not (tmp_path / "some.lengths").exists()


def test_without_documents_there_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no text to write to data: the input is empty"):
        with IndexedWriter(tmp_path / "data", 9) as writer:
            writer.add(np.array([], np.int32), np.array([], np.uint16))
            writer.finish()
    assert not (tmp_path / "data.idx").exists()


def test_ids_have_the_type_of_the_vocabulary() -> None:
    for size in (2, 65_499, 65_500, 2**31):
        assert id_type(size) == np.dtype(DType.optimal_dtype(size))
