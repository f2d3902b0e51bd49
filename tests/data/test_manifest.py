import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.manifest import Manifest, manifest_path, read_manifest, write_manifest
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


FACTS: dict[str, Any] = {
    "documents": 1, "tokens": 1, "bin_sha256": "", "idx_sha256": "", "tokenizer": None,
    "seq_length": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        {"format": 2, **FACTS},
        {"format": 1, **FACTS, "tokens": "many"},
        {"format": 1, **FACTS, "more": 1},
        {"format": 1},
    ],
)
def test_a_manifest_of_another_form_is_told(tmp_path: Path, content: dict[str, Any]) -> None:
    write_sealed(manifest_path(tmp_path / "data"), content)
    with pytest.raises(InputError, match=r"data\.manifest\.json is not of format 1"):
        read_manifest(tmp_path / "data")


@pytest.mark.parametrize("change", ["[" * 100_000, "{}", "", "\ufffd", '{"checksum": 1}'])
def test_a_damaged_manifest_is_told(tmp_path: Path, change: str) -> None:
    write_manifest(tmp_path / "data", Manifest(**FACTS))
    assert read_manifest(tmp_path / "data") == Manifest(**FACTS)
    manifest_path(tmp_path / "data").write_text(change)
    with pytest.raises(InputError, match=r"data\.manifest\.json is damaged .*delete it") as caught:
        read_manifest(tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_every_field_counts(tmp_path: Path) -> None:
    assert {field.name for field in dataclasses.fields(Manifest)} == FACTS.keys()
