"""An .npz file with one array that grows by rows during a run.

    numpy.load("file.npz")["steps"]        # the complete rows, at any time

An .npz file is a ZIP archive of .npy files. Here they are stored, not compressed, so a row has a
place in the file and can be mapped into memory. The array that grows is the last member:

    fixed arrays | local header, .npy header, rows | directory

The directory at the end says where the members are and has a CRC-32 of each. To append a row is

1. to write the directory where it will be in the end, after the place of the row;
2. to write the row, over the previous directory;
3. to write the new directory, and then both headers, which count the row.

Each step is on the disk before the next begins. So a process that is killed, a machine that stops
and a full disk leave a file that NumPy reads, with all complete rows.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_NO_TIME = (1 << 5) | 1  # 1980-01-01, the first day that the format has: equal runs, equal bytes
_BY_VERSION = 45  # of the format: the first with sizes above 4 GiB
_IN_EXTRA = 0xFFFFFFFF  # for a size or place that is in a longer field
_LOCAL, _ENTRY = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END64, _LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_HEADER_LIMIT = 65536  # bytes of a .npy header; more than any array here has
_CHUNK = 1 << 22


class GrowingNpz:
    """Appends rows to an array `name` of an .npz file. Each is on the disk on return."""

    def __init__(
        self, path: Path, fixed: Mapping[str, np.ndarray[Any, Any]], name: str, row: np.dtype[Any]
    ) -> None:
        """
        Args:
            fixed: the other arrays of the file, which are small.
            row: the type of a row, with fields. A row that is smaller than a directory, of some 400
                bytes, is padded to that size, because step 1 needs it.

        Writes nothing. `begin` or `keep` must come first.
        """
        self._path, self._row, self._growing = path, row, f"{name}.npy"
        self._count, self._crc = 0, 0  # of the rows
        self._members = [_Member(f"{key}.npy", _npy(array)) for key, array in fixed.items()]
        self._row = padded(row, len(self._directory(0)))
        self._place = sum(member.size_in_file for member in self._members)  # of the headers
        self._begin = self._place + len(self._headers())  # of the rows

    def made(self, rows: np.memmap[Any, Any]) -> bool:
        """Whether `mapped` rows are of a file that this class has written with these arguments."""
        return rows.offset == self._begin and rows.dtype == self._row

    def begin(self) -> None:
        """Makes the file anew, without rows. Raises OSError."""
        fixed = b"".join(member.local_header() + member.content for member in self._members)
        with self._path.open("wb") as file:
            _write(file, 0, fixed + self._headers() + self._directory(self._end(0)))

    def keep(self, count: int) -> None:
        """Goes on with a file of the same members and type, and its first `count` rows.

        Raises OSError.
        """
        with self._path.open("r+b") as file:
            file.seek(self._begin)
            while file.tell() < self._end(count):
                read = file.read(min(self._end(count) - file.tell(), _CHUNK))
                if not read:
                    raise OSError(f"{self._path} has fewer than {count} rows")
                self._crc = zlib.crc32(read, self._crc)
            self._count = count
            _write(file, self._place, self._headers())
            self._finish(file)

    def append(self, row: np.ndarray[Any, Any]) -> None:
        """Adds an array of one element. Raises OSError; then the file is as it was."""
        data: memoryview | bytes = row.view(np.uint8).data
        if row.itemsize < self._row.itemsize:
            data = row.tobytes().ljust(self._row.itemsize, b"\0")
        end, new_end = self._end(self._count), self._end(self._count + 1)
        with self._path.open("r+b") as file:
            try:
                _write(file, new_end, self._directory(new_end))
                _write(file, end, data)
            except OSError:
                self._finish(file)
                raise
            self._crc, self._count = zlib.crc32(data, self._crc), self._count + 1
            _write(file, new_end, self._directory(new_end))
            _write(file, self._place, self._headers())

    def _finish(self, file: BinaryIO) -> None:
        end = self._end(self._count)
        directory = self._directory(end)
        _write(file, end, directory)
        file.truncate(end + len(directory))

    def _end(self, count: int) -> int:
        """The place after `count` rows."""
        return self._begin + count * self._row.itemsize

    def _member(self) -> _Member:
        """The array that grows. Its `content` is the .npy header alone."""
        stream = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(self._row)
        header = {"descr": descr, "fortran_order": False, "shape": (self._count,)}
        # NumPy pads headers, so that this one has the same size for any number of rows.
        np.lib.format.write_array_header_1_0(stream, header)
        rows = self._count * self._row.itemsize
        return _Member(self._growing, stream.getvalue(), self._crc, rows)

    def _headers(self) -> bytes:
        member = self._member()
        return member.local_header() + member.content

    def _directory(self, place: int) -> bytes:
        """The directory of the file as it is, and the end of the archive, at `place`."""
        entries, offset, members = b"", 0, [*self._members, self._member()]
        for member in members:
            entries += member.entry(offset)
            offset += member.size_in_file
        number, size, after = len(members), len(entries), place + len(entries)
        counts = 0, 0, number, number
        return b"".join(
            (
                entries,
                _END64.pack(b"PK\6\6", 44, _BY_VERSION, _BY_VERSION, *counts, size, place),
                _LOCATOR.pack(b"PK\6\7", 0, after, 1),
                _END.pack(b"PK\5\6", *counts, _IN_EXTRA, _IN_EXTRA, 0),
            )
        )


def padded(row: np.dtype[Any], size: int) -> np.dtype[Any]:
    """The type with additional bytes after its fields, if it has fewer than `size`."""
    if row.itemsize >= size:
        return row
    assert row.names is not None and row.fields is not None
    kinds, offsets = zip(*(row.fields[name][:2] for name in row.names), strict=True)
    return np.dtype({"names": row.names, "formats": kinds, "offsets": offsets, "itemsize": size})


class _Member:
    """A stored member: `content`, then `more` bytes with the CRC-32 `crc_of_more`."""

    def __init__(self, name: str, content: bytes, crc_of_more: int = 0, more: int = 0) -> None:
        self.name, self.content = name.encode("ascii"), content
        self._size = len(content) + more
        self._crc = joined_crc32(zlib.crc32(content), crc_of_more, more)

    @property
    def size_in_file(self) -> int:
        return len(self.local_header()) + self._size

    def local_header(self) -> bytes:
        sizes = struct.pack("<2H2Q", 1, 16, self._size, self._size)
        fields = _BY_VERSION, 0, 0, 0, _NO_TIME, self._crc, _IN_EXTRA, _IN_EXTRA
        name = self.name
        return _LOCAL.pack(b"PK\3\4", *fields, len(name), len(sizes)) + name + sizes

    def entry(self, offset: int) -> bytes:
        """In the directory, of a member at `offset`."""
        extra = struct.pack("<2H3Q", 1, 24, self._size, self._size, offset)
        fields = _BY_VERSION, _BY_VERSION, 0, 0, 0, _NO_TIME, self._crc, _IN_EXTRA, _IN_EXTRA
        lengths = len(self.name), len(extra), 0, 0, 0
        return _ENTRY.pack(b"PK\1\2", *fields, *lengths, 0, _IN_EXTRA) + self.name + extra


def joined_crc32(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces of data, from the CRC-32 of each and the `length` of the second.

    The remainder of the first piece is multiplied by x^(8 length) modulo the polynomial.
    """
    power, factor = 8 * length, 1 << 30  # x, with its bits in the order of the CRC
    while power:
        if power & 1:
            first = _product(first, factor)
        factor, power = _product(factor, factor), power >> 1
    return first ^ second


def _product(a: int, b: int) -> int:
    """Of two polynomials over GF(2), modulo that of CRC-32. Bit 31 is the coefficient of 1."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()


def _write(file: BinaryIO, place: int, data: bytes | memoryview) -> None:
    """Writes to a place in a file; the bytes are on the disk on return. Raises OSError."""
    file.seek(place)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def mapped(path: str | Path, name: str) -> np.memmap[Any, Any]:
    """An array of an .npz file, which is read when it is used.

    The file may be one of numpy.savez too. Raises OSError, and ValueError, with the reason in a few
    words, if there is no such array of one dimension that is stored and not compressed.
    """
    with open(path, "rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                member = archive.getinfo(f"{name}.npy")
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError("it is cut, or not an .npz file") from error
        except KeyError as error:
            raise ValueError(f"it has no array {name}") from error
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed; numpy.savez does not compress")
        stream.seek(member.header_offset)
        local = stream.read(_LOCAL.size)
        if len(local) < _LOCAL.size:
            raise ValueError("it is damaged")
        begin = stream.tell() + sum(_LOCAL.unpack(local)[-2:])
        stream.seek(begin)
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError(f"its array {name} has a header of another version")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream, _HEADER_LIMIT)
        offset = stream.tell()
    if dtype.hasobject or len(shape) != 1:
        raise ValueError(f"its array {name} has wrong dimensions, or contains objects")
    if offset - begin + shape[0] * dtype.itemsize > member.file_size:
        raise ValueError(f"its array {name} is cut")
    return np.memmap(path, dtype, "r", offset, shape)
