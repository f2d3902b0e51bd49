import bz2
import gzip
import hashlib
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from moe_parallel.data.preprocess.compressed import DigestedFile, blocks
from moe_parallel.data.preprocess.inputs import InputFile
from moe_parallel.errors import InputError

TEXT = b"".join(b'{"text": "%d"}\n' % random.Random(i).getrandbits(40) for i in range(60))


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def parts(pack: Callable[[bytes], bytes]) -> bytes:
    """Two members or frames, as `cat a.gz b.gz` or a parallel compressor writes them."""
    return pack(TEXT[:500]) + pack(TEXT[500:])


def digested(path: Path) -> DigestedFile:
    return DigestedFile(InputFile(path, "text", None, "--input"))


def read(path: Path) -> bytes:
    with digested(path) as file:
        return b"".join(blocks(file))


PACKERS = {".gz": gz, ".zst": zst, ".bz2": bz2.compress, ".xz": lzma.compress}
FORMATS = {"": TEXT, **{suffix: parts(pack) for suffix, pack in PACKERS.items()}}

every_packer = pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("named", [True, False])
def test_the_content_is_read_whatever_the_name(tmp_path: Path, suffix: str, named: bool) -> None:
    path = tmp_path / f"in.jsonl{suffix * named}"
    path.write_bytes(FORMATS[suffix])
    with digested(path) as file:
        assert b"".join(blocks(file)) == TEXT
        assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert file.count == path.stat().st_size


@every_packer
def test_every_cut_is_told(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "in"
    whole, boundary = parts(pack), len(pack(TEXT[:500]))
    for length in {boundary, *range(4, len(whole), 7)}:
        path.write_bytes(whole[:length])
        if length == boundary:
            assert read(path) == TEXT[:500]
            continue
        with pytest.raises(InputError, match=rf"in is (truncated at {length}|damaged)"):
            read(path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_bit_that_flips_is_told_or_changes_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in{suffix}"
    whole = PACKERS[suffix](TEXT)
    for bit in random.Random(0).sample(range(8 * len(whole)), 250):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            assert read(path) == TEXT, bit
        except InputError as error:
            assert "\n" not in str(error)


@every_packer
def test_a_small_file_with_much_in_it_comes_in_blocks(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(pack(bytes(60 * 2**20)))
    assert path.stat().st_size < 2**18
    with digested(path) as file:
        sizes = [len(block) for block in blocks(file)]
    assert sum(sizes) == 60 * 2**20 and max(sizes) <= 32 * 2**20


@pytest.mark.parametrize("suffix", [*PACKERS, ".parquet"])
@pytest.mark.parametrize("content", [b"", b"{}\n", *(pack(TEXT) for pack in PACKERS.values())])
def test_a_file_that_is_not_what_its_name_says_is_told(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(content)
    if suffix in PACKERS and content == PACKERS[suffix](TEXT):
        assert read(path) == TEXT
        return
    with pytest.raises(InputError, match=rf"in{suffix} is not a {suffix} file"):
        digested(path)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        digested(tmp_path / "none")
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        digested(tmp_path)


def test_without_zstandard_its_installation_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "in.zst").write_bytes(zst(TEXT))
    with pytest.raises(InputError, match=r"in\.zst needs zstandard, .*: pip install zstandard$"):
        read(tmp_path / "in.zst")
