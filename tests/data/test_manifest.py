import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.manifest import (
    Manifest,
    Size,
    SourceFile,
    manifest_path,
    read_manifest,
    write_manifest,
)
from moe_parallel.data.sealed import file_digest, write_sealed
from moe_parallel.errors import InputError


def test_a_dataset_says_what_it_holds(tmp_path: Path) -> None:
    prefix = tmp_path / "a.b"
    write_indexed(prefix, [[1, 2, 3], [4], []], 10, tokenizer="abc", seq_length=3)
    assert read_manifest(prefix) == Manifest(
        documents=2,
        tokens=4,
        bin_sha256=file_digest(Path(f"{prefix}.bin")),
        idx_sha256=file_digest(Path(f"{prefix}.idx")),
        tokenizer="abc",
        seq_length=3,
    )


def test_what_megatron_wrote_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path / "data") is None


OLD: dict[str, Any] = {
    "documents": 3, "tokens": 7, "bin_sha256": "", "idx_sha256": "", "tokenizer": None,
    "seq_length": None,
}  # fmt: skip
SOURCE = {"path": "a.jsonl", "bytes": 9, "sha256": "abc"}
DOMAINS = {"a": {"documents": 1, "tokens": 4}, "b": {"documents": 2, "tokens": 3}}
FACTS: dict[str, Any] = {**OLD, "sources": [SOURCE], "domains": DOMAINS}
MANIFEST = Manifest(
    **OLD,
    sources=(SourceFile("a.jsonl", 9, "abc"),),
    domains={"a": Size(1, 4), "b": Size(2, 3)},
)


@pytest.mark.parametrize(
    "content",
    [
        {"format": 3, **FACTS},
        {**FACTS},
        {"format": 1, **FACTS},
        {"format": 1, **OLD, "tokens": "many"},
        {"format": 1, **OLD, "more": 1},
        {"format": 1},
        {"format": 2, **OLD},
        {"format": 2, **FACTS, "more": 1},
        {"format": 2, **FACTS, "tokens": 8},
        {"format": 2, **FACTS, "domains": {}},
        {"format": 2, **FACTS, "domains": [["a", 3, 7]]},
        {"format": 2, **FACTS, "domains": {"a": {"documents": 3}}},
        {"format": 2, **FACTS, "domains": {"a": {"documents": 3, "tokens": "7"}}},
        {"format": 2, **FACTS, "sources": 1},
        {"format": 2, **FACTS, "sources": ["a.jsonl"]},
        {"format": 2, **FACTS, "sources": [{**SOURCE, "bytes": None}]},
        {"format": 2, **FACTS, "sources": [{**SOURCE, "more": 1}]},
    ],
)
def test_a_manifest_of_another_form_is_told(tmp_path: Path, content: dict[str, Any]) -> None:
    write_sealed(manifest_path(tmp_path / "data"), content)
    message = r"data\.manifest\.json is not of format [12].*; restore it, or delete it"
    with pytest.raises(InputError, match=message) as told:
        read_manifest(tmp_path / "data")
    assert "\n" not in str(told.value)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path / "data", MANIFEST)
    assert read_manifest(tmp_path / "data") == MANIFEST
    write_sealed(manifest_path(tmp_path / "hand"), {"format": 2, **FACTS})
    assert read_manifest(tmp_path / "hand") == MANIFEST


def test_one_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    write_sealed(manifest_path(tmp_path / "data"), {"format": 1, **OLD})
    assert read_manifest(tmp_path / "data") == Manifest(**OLD, sources=None, domains=None)


@pytest.mark.parametrize("change", ["[" * 100_000, "{}", "", "\ufffd", '{"checksum": 1}'])
def test_a_damaged_manifest_is_told(tmp_path: Path, change: str) -> None:
    write_manifest(tmp_path / "data", MANIFEST)
    assert read_manifest(tmp_path / "data") == MANIFEST
    manifest_path(tmp_path / "data").write_text(change)
    with pytest.raises(InputError, match=r"data\.manifest\.json is damaged .*delete it") as caught:
        read_manifest(tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_every_field_counts(tmp_path: Path) -> None:
    assert {field.name for field in dataclasses.fields(Manifest)} == FACTS.keys()
