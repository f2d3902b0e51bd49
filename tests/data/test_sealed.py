import json
from pathlib import Path

import pytest

from moe_parallel.data.sealed import read_sealed, write_sealed
from moe_parallel.reading import parse_json


def test_what_was_written_is_read(tmp_path: Path) -> None:
    content = {"number": 1, "text": "façade", "none": None, "inner": {"b": [1, 2], "a": {}}}
    write_sealed(tmp_path / "file.json", content)
    assert read_sealed(tmp_path / "file.json") == content


def test_a_flipped_bit_is_seen_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    content = {"bytes": 1024, "name": "data", "none": None}
    write_sealed(path, content)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError) as caught:
            assert read_sealed(path) != content  # if nothing is raised, the test fails
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff{}", "not UTF-8 at byte 1"),
        (b'{"a": ', "not JSON at line 1, column"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 500 + b"]" * 500, "nested too deeply"),
        (b"9" * 5_000, "digits"),
        *((number, "a number is not finite") for number in (b"[1e400]", b"9" * 400, b"NaN")),
    ],
)
def test_json_of_any_kind_is_told_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [[], 1, {}, {"checksum": 5}, {"checksum": "0" * 64}])
def test_json_without_its_checksum_is_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / "file.json").write_text(json.dumps(content))
    with pytest.raises(ValueError):
        read_sealed(tmp_path / "file.json")
