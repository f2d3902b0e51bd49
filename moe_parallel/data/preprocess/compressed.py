"""Reads plain and compressed files in blocks of bounded size, and digests what is on the disk."""

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator

from moe_parallel.data.preprocess.inputs import InputFile
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional

_BLOCK = 2**20
# A block of a .zst file can expand to 32,000 times its size, so little is given at a time.
_ZST_BLOCK = 2**10

GZ, ZST, BZ2, XZ, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zX", b"PAR1"
_MAGIC_OF = {".gz": GZ, ".zst": ZST, ".bz2": BZ2, ".xz": XZ, ".parquet": PARQUET}


class DigestedFile(io.RawIOBase):
    """A file as it is on the disk; counts and digests the bytes that are read.

    Attributes:
        input: the file that is read.
        count: bytes read so far.
        head: the first four bytes.
    """

    def __init__(self, file: InputFile) -> None:
        """Raises InputError if the file cannot be read, or is not what its name says."""
        self.input = file
        self.count = 0
        self._digest = hashlib.sha256()
        try:
            self._opened = file.path.open("rb", buffering=0)
            self.head = self._rest = self._opened.read(4) or b""
        except OSError as error:
            raise self._unreadable(error) from None
        kind = file.path.suffix.lower()
        magic = _MAGIC_OF.get(kind)
        if magic is not None and not self.head.startswith(magic):
            raise InputError(
                f"{file} is not a {kind} file (its first bytes differ): get it again, or "
                "rename it if it is another kind"
            )

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        if self._rest:
            data, self._rest = self._rest[:size], self._rest[size:] if size >= 0 else b""
        else:
            try:
                data = self._opened.read(size) or b""
            except OSError as error:
                raise self._unreadable(error) from None
        self.count += len(data)
        self._digest.update(data)
        return data

    def sha256(self) -> str:
        """The digest of the whole file, of which the rest is read now."""
        while self.read(_BLOCK):
            pass
        return self._digest.hexdigest()

    def close(self) -> None:
        self._opened.close()
        super().close()

    def _unreadable(self, error: OSError) -> InputError:
        return InputError(f"{self.input} cannot be read ({error.strerror})")


def blocks(file: DigestedFile) -> Iterator[bytes]:
    """The decompressed content in blocks of at most 32 MiB, usually 1 MiB.

    Raises:
        InputError: the file is damaged, or ends before its compressed content does.
    """
    if file.head.startswith(GZ):
        return _gz_blocks(file)
    if file.head.startswith(BZ2):
        return _stream_blocks(file, bz2.BZ2Decompressor)
    if file.head == XZ:
        return _stream_blocks(file, lzma.LZMADecompressor)
    if file.head == ZST:
        return _zst_blocks(file)
    return iter(lambda: file.read(_BLOCK), b"")


def _gz_blocks(file: DigestedFile) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:  # type: ignore[arg-type]
            while block := unpacked.read(_BLOCK):
                yield block
    except EOFError:
        raise _truncated(file) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(file, error) from None


def _stream_blocks(
    file: DigestedFile, begin: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
) -> Iterator[bytes]:
    """The content of the streams in a file, one after another.

    If the beginning of a later stream is damaged, bz2.BZ2File and lzma.LZMAFile would leave out the
    rest of the file without an error.
    """
    unpack, data = begin(), file.read(_BLOCK)
    begun = False  # a stream has begun and has not ended
    try:
        while data or not unpack.needs_input:
            begun = True
            if block := unpack.decompress(data, _BLOCK):
                yield block
            data = b""
            if unpack.eof:
                data, begun = unpack.unused_data, False
                unpack = begin()
            if not data and unpack.needs_input:
                data = file.read(_BLOCK)
    except (OSError, lzma.LZMAError) as error:
        raise _damaged(file, error) from None
    if begun:
        raise _truncated(file)


def _zst_blocks(file: DigestedFile) -> Iterator[bytes]:
    library = import_optional("zstandard", str(file.input))
    unpack = library.ZstdDecompressor().decompressobj()
    data = file.read(_ZST_BLOCK)
    begun = False  # a frame has begun and has not ended
    try:
        while data:
            begun = True
            if block := unpack.decompress(data):
                yield block
            data = b""
            if unpack.eof:
                data, begun = unpack.unused_data, False
                unpack = library.ZstdDecompressor().decompressobj()
            data = data or file.read(_ZST_BLOCK)
    except library.ZstdError as error:
        raise _damaged(file, error) from None
    if begun:
        raise _truncated(file)


def _truncated(file: DigestedFile) -> InputError:
    return InputError(f"{file.input} is truncated at {file.count:,} bytes: get it again")


def _damaged(file: DigestedFile, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    return InputError(
        f"{file.input} is damaged before byte {file.count:,} ({reason}): get it again"
    )
