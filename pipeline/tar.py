"""The members of a tar file, by their headers: what is in it, where its bytes begin, how many they are.

Reads ustar, GNU and pax archives (POSIX.1-2017, pax; the GNU tar manual, "Basic Tar Format"). It is stricter than tools
for unpacking, which pass over damage: a training set that is cut must not look like a shorter one. Only headers are
read, and what the caller asks for; names are bytes, as they stand there.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator

from headrace.pipeline.formats import sniff

#: Everything in a tar begins at a multiple of it.
BLOCK = 512

_ZEROS = bytes(BLOCK)
_LONGEST_EXTENSION = 1 << 20  # bytes of a long name or of a pax header
_NEAR = 1 << 15  # bytes jumped over without a thought of reading less at once
_WIDE = 1 << 18  # read at once where members lie close together
_NARROW = 1 << 12  # read at once where they do not
_READ = 1 << 20
_ADLER = 65521  # adler32's lower half is 1 + the sum of the bytes, modulo this

_FILES = frozenset(b"0\x007")  # regular; old form of it; contiguous
_LEFT_OUT = {
    ord("2"): "symbolic link",
    ord("3"): "device",
    ord("4"): "device",
    ord("5"): "folder",
    ord("6"): "FIFO",
    ord("V"): "volume label",
}
_REFUSED = {
    ord("1"): "a hard link to another member (with GNU tar, --hard-dereference writes the file instead)",
    ord("S"): "a sparse file (with GNU tar, leave out --sparse)",
    ord("M"): "the rest of a file that begins in another volume",
    ord("D"): "a folder of an incremental dump",
}
_COMPRESSED = {
    "gzip": "gunzip it",
    "bzip2": "bunzip2 it",
    "xz": "unxz it",
    "Zstandard": "unzstd it",
}


class TarError(Exception):
    """A tar that cannot be taken. The text says what is wrong and at which offset; the name is the caller's to add."""


class Tar:
    """One tar file that is open for reading.

    Args:
        fd: stays the caller's.
        size: of the file, in bytes.

    Attributes:
        left_out: what is no regular file: kind → number; whole once `members` has ended.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.left_out: Counter[str] = Counter()
        self._fd = fd
        self._size = size
        self._window = b""
        self._start = 0  # of the window in the file

    def members(self) -> Iterator[tuple[bytes, int, int]]:
        """`(name, offset, size)` of each regular file, in the order of the tar; offset and size are those of its data.

        Raises:
            TarError: damaged, cut, compressed or no tar; a member that is refused; anything behind the end.
            OSError: an I/O error.
        """
        at = 0
        path: bytes | None = None
        stored: int | None = None
        while True:
            begin = at - self._start
            header = self._window[begin : begin + BLOCK]
            if len(header) < BLOCK:
                header = self._block(at)
            if header == _ZEROS:
                break
            if not _is_header(header):
                raise self._no_header(at, header)
            kind = header[156]
            data = at + BLOCK
            size = _number(header[124:136], "size", at)
            if kind in b"xXLKg":
                if data + size > self._size:
                    raise self._cut(at, size, "an extended header")
                if kind == ord("L"):
                    path = path or self._extension(at, size).partition(b"\0")[0]
                elif kind != ord("K"):
                    records = _pax(self._extension(at, size), at)
                    _refuse_sparse(records, at)
                    if kind != ord("g"):
                        path = records.get(b"path", path)
                        stored = _decimal(records[b"size"], at) if b"size" in records else stored
                    elif b"path" in records or b"size" in records:
                        raise TarError(f"a global pax header at offset {at} gives every member one path or size")
                at = _next(data, size)
                continue
            name = _name(header) if path is None else path
            size = size if stored is None else stored
            path = stored = None
            if kind in _FILES:
                if data + size > self._size:
                    raise self._cut(at, size, _quoted(name))
                at = _next(data, size)
                if name.endswith(b"/"):  # how folders were written before there was a type for them
                    self.left_out["folder"] += 1
                else:
                    yield name, data, size
            elif kind in _LEFT_OUT:
                self.left_out[_LEFT_OUT[kind]] += 1
                at = data
            else:
                what = _REFUSED.get(kind, f"of type {bytes([kind])!r}, which is not known")
                raise TarError(f"{_quoted(name)}, at offset {at}, is {what}")
        if path is not None or stored is not None:
            raise TarError(f"ends at offset {at} behind an extended header, without the member that it is for")
        self._check_end(at)

    def read(self, offset: int, size: int) -> bytes:
        """Some bytes of the file.

        Raises:
            TarError: the file ends before.
            OSError: an I/O error.
        """
        begin = offset - self._start
        if 0 <= begin and begin + size <= len(self._window):
            return self._window[begin : begin + size]
        data = pread(self._fd, size, offset)
        if len(data) < size:
            raise TarError(f"is cut: it ends at offset {offset + len(data)}, while it is read")
        return data

    def _block(self, at: int) -> bytes:
        """The block there, which is not in the window."""
        # Who jumps far will jump again, and what is between is not to be read.
        near = at - self._start <= len(self._window) + _NEAR
        self._window, self._start = pread(self._fd, _WIDE if near else _NARROW, at), at
        block = self._window[:BLOCK]
        if len(block) == BLOCK:
            return block
        if not self._size:
            raise TarError("is empty")
        if block:
            raise self._no_header(0, block) if not at else TarError(f"is cut within a header, at offset {at}")
        raise TarError(f"is cut: it ends at offset {min(at, self._size)} without the zeros that end a tar")

    def _cut(self, at: int, size: int, what: str) -> TarError:
        there = max(0, self._size - at - BLOCK)
        return TarError(f"is cut: {what}, at offset {at}, has {size} bytes, of which {there} are there")

    def _extension(self, at: int, size: int) -> bytes:
        if size > _LONGEST_EXTENSION:
            raise TarError(f"an extended header, at offset {at}, has {size} bytes; {_LONGEST_EXTENSION} are allowed")
        return self.read(at + BLOCK, size)

    def _no_header(self, at: int, block: bytes) -> TarError:
        if at:
            return TarError(f"is damaged: there is no header at offset {at}, where one must be")
        _, what = sniff(block)
        if what in _COMPRESSED:
            return TarError(f"is compressed ({what}); samples are read at offsets, so {_COMPRESSED[what]}")
        return TarError(f"is no tar, but {what}")

    def _check_end(self, at: int) -> None:
        while data := pread(self._fd, _READ, at):
            if data.count(0) != len(data):
                behind = at + len(data) - len(data.lstrip(b"\0"))
                raise TarError(f"goes on behind its end, at offset {behind}: are these two tars, one behind the other?")
            at += len(data)


def _is_header(block: bytes) -> bool:
    """Whether the block's checksum is right: the sum of its bytes, those of the checksum itself as spaces."""
    field = block[148:156]
    try:
        said = int(field.rstrip(b"\0 "), 8)
    except ValueError:
        return False
    # Summing 512 bytes takes ten times as long in Python.
    if ((zlib.adler32(block) & 0xFFFF) - 1 - sum(field) + 256 - said) % _ADLER == 0:
        return True
    # Some old programs took bytes as signed numbers.
    return said == sum(block[:148]) + sum(block[156:]) + 256 - 256 * sum(b > 127 for b in block[:148] + block[156:])


def _number(field: bytes, what: str, at: int) -> int:
    """Octal digits; or, where a number is too large for them, base 256 behind a byte of 128."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    try:
        if not digits or digits.isdigit():
            return int(digits or b"0", 8)
    except ValueError:
        pass
    raise TarError(f"is damaged: the header at offset {at} has no number for the {what}, but {field!r}")


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:263] == b"ustar\0":  # GNU's own form has times there
        prefix = header[345:476] if header[508:512] == b"tar\0" else header[345:500]
        return prefix.partition(b"\0")[0] + b"/" + name
    return name


def _pax(data: bytes, at: int) -> dict[bytes, bytes]:
    """The records `LENGTH KEYWORD=VALUE\\n` of a pax header."""
    records: dict[bytes, bytes] = {}
    begin = 0
    while begin < len(data):
        digits, space, _ = data[begin : begin + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = data[begin + len(digits) + 1 : begin + length]
        keyword, equals, value = record.partition(b"=")
        if not equals or begin + length > len(data) or not value.endswith(b"\n"):
            raise TarError(f"is damaged: the pax header at offset {at} has no record at its byte {begin}")
        records[keyword] = value[:-1]
        begin += length
    return records


def _refuse_sparse(records: dict[bytes, bytes], at: int) -> None:
    if any(keyword.startswith((b"GNU.sparse.", b"SCHILY.realsize")) for keyword in records):
        name = records.get(b"GNU.sparse.name", records.get(b"path", b"a member"))
        raise TarError(f"{_quoted(name)}, at offset {at}, is {_REFUSED[ord('S')]}")


def _decimal(value: bytes, at: int) -> int:
    if not value.isdigit() or len(value) > 20:
        raise TarError(f"is damaged: the pax header at offset {at} has no number for the size, but {value[:40]!r}")
    return int(value)


def _next(data: int, size: int) -> int:
    return data + -(-size // BLOCK) * BLOCK


def pread(fd: int, size: int, offset: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    while data and (size := size - len(data)):
        offset += len(data)
        data = os.pread(fd, size, offset)
        parts.append(data)
    return b"".join(parts)


def _quoted(name: bytes) -> str:
    text = name.decode("utf-8", "backslashreplace")
    return f'"{text}"' if text.isprintable() else ascii(text)
