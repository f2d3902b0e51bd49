"""The files of a checkpoint compared with their description."""

import pytest

from moe_parallel.collective_errors import StorageError
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.record import (
    check_complete,
    check_content,
    check_sizes,
    describe_files,
    list_files,
)

EVERYTHING = slice(None)


def test_damage_is_found_by_size_and_by_content(tmp_path):
    weights = tmp_path / "weights"
    weights.write_text("12345")
    (tmp_path / "checkpoint.json").write_text("")
    files = describe_files(tmp_path, list_files(tmp_path))
    # 0xcbf53a1c is the CRC-32 of "12345" in other programs.
    assert files == {"weights": {"bytes": 5, "crc32": 0xCBF53A1C}}
    check_sizes(tmp_path, files)
    check_content(tmp_path, files, EVERYTHING)
    weights.write_text("12346")
    with pytest.raises(
        InputError, match="incomplete or damaged: weights is damaged; it cannot be loaded"
    ):
        check_content(tmp_path, files, EVERYTHING)
    weights.write_text("1234")
    with pytest.raises(InputError, match="weights has 4 bytes instead of 5"):
        check_sizes(tmp_path, files)
    weights.unlink()
    with pytest.raises(InputError, match="weights is missing"):
        check_sizes(tmp_path, files)


def test_ranks_share_the_reading(tmp_path):
    for name in "abcde":
        (tmp_path / name).write_text(name)
    files = describe_files(tmp_path, list_files(tmp_path))
    (tmp_path / "c").write_text("x")
    check_content(tmp_path, files, slice(1, None, 2))
    with pytest.raises(InputError, match="c is damaged"):
        check_content(tmp_path, files, slice(0, None, 2))


def test_config_and_tokenizer_alone_are_no_checkpoint(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(StorageError, match=r"^\.metadata is missing: every rank has to write"):
        check_complete(tmp_path, describe_files(tmp_path, list_files(tmp_path)))
