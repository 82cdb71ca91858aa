"""From a line of the index to a sample's bytes: what was indexed, or an error by name."""

from __future__ import annotations

import errno
import os
import stat
from datetime import UTC, datetime
from typing import Protocol

from headrace.errors import DatasetError
from headrace.pipeline.index import Index, mtime_of
from headrace.pipeline.probe import BadPicture
from headrace.pipeline.spec import Decode

_NOT_REGULAR = "it is not a regular file any more"
_GONE = {
    errno.ENOENT: "it does not exist any more",
    errno.ENOTDIR: "it does not exist any more",
    errno.ELOOP: "it is a link to itself now",
    errno.ENXIO: _NOT_REGULAR,  # a socket
}
_REMEDY = "run `headrace check --reindex`, then start the daemon again"


class Source(Protocol):
    """Reads samples."""

    def read(self, i: int) -> bytes:
        """All bytes of sample i.

        Raises:
            DatasetError: it is not what was indexed any more; by name. Trying again does not help.
            OSError: an I/O error; trying again may help.
            BadPicture: it is larger than `max_file_bytes`.
        """
        ...


class FileSource:
    """Samples that are files: each is one, whole."""

    def __init__(self, index: Index, decode: Decode) -> None:
        self._index = index
        self._limit = decode.max_file_bytes

    def read(self, i: int) -> bytes:
        name = self._index.shown_full(i)
        size, mtime_ns = int(self._index.sizes[i]), int(self._index.mtimes_ns[i])
        fd = open_indexed(self._index.full_path(i), name)
        try:
            compare(name, os.fstat(fd), size, mtime_ns)
            check_size(size, self._limit)
            data = _read(fd, size)
            # A file rewritten under our hands would give a mix of two pictures.
            compare(name, os.fstat(fd), size, mtime_ns)
        finally:
            os.close(fd)
        if len(data) != size:
            raise changed(name, f"size {size} → {len(data)}")
        return data


def open_indexed(path: bytes, name: str, whose: str = "") -> int:
    """A descriptor of what was indexed at this path.

    Args:
        name: of the sample, for people.
        whose: what the path is to the sample, if it is not itself: "its tar: ".

    Raises:
        DatasetError: nothing that could be it is there.
        OSError: an I/O error.
    """
    try:
        # O_NONBLOCK: should a FIFO stand there now, opening it must not wait for a writer.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            raise changed(name, whose + _GONE[error.errno]) from None
        raise


def compare(name: str, now: os.stat_result, size: int, mtime_ns: int, whose: str = "") -> None:
    """
    Args:
        name: of the sample, for people.
        now: the file's state.
        size, mtime_ns: its state when it was indexed.
        whose: as above.

    Raises:
        DatasetError: they differ.
    """
    if not stat.S_ISREG(now.st_mode):
        raise changed(name, whose + _NOT_REGULAR)
    if now.st_size != size:
        raise changed(name, f"{whose}size {size} → {now.st_size}")
    if mtime_of(now) != mtime_ns:
        raise changed(name, f"{whose}modified {_time(mtime_ns)} → {_time(now.st_mtime_ns)}")


def check_size(size: int, limit: int) -> None:
    """
    Raises:
        BadPicture: the sample is larger than `max_file_bytes`.
    """
    if size > limit:
        raise BadPicture("read", f"a file of {size} bytes, but max_file_bytes is {limit}")


def changed(name: str, how: str) -> DatasetError:
    return DatasetError(f"{name}: changed since it was indexed: {how}; {_REMEDY}")


def _read(fd: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    data = os.read(fd, size)
    if len(data) == size:
        return data
    parts = [data]
    while data and (size := size - len(data)):
        data = os.read(fd, size)
        parts.append(data)
    return b"".join(parts)


def _time(ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%d %H:%M:%S}.{ns % 10**9:09d}"
    except (ValueError, OverflowError):
        return f"{ns} ns"
