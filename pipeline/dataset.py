"""Data sets: from a description to an index, and from a line of the index to a file's bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from headrace.errors import DatasetError
from headrace.pipeline.files import Progress
from headrace.pipeline.folder import list_folder, real_root
from headrace.pipeline.index import VERSION, Index, Listing, shown
from headrace.pipeline.probe import BadPicture
from headrace.pipeline.spec import Dataset, Decode

log = logging.getLogger(__name__)

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
        try:
            # O_NONBLOCK: should a FIFO stand there now, opening it must not wait for a writer.
            fd = os.open(self._index.full_path(i), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _GONE:
                raise self._changed(i, _GONE[error.errno]) from None
            raise
        try:
            self._compare(i, os.fstat(fd))
            size = int(self._index.sizes[i])
            if size > self._limit:
                raise BadPicture("read", f"a file of {size} bytes, but max_file_bytes is {self._limit}")
            data = _read(fd, size)
            # A file rewritten under our hands would give a mix of two pictures.
            self._compare(i, os.fstat(fd))
        finally:
            os.close(fd)
        if len(data) != size:
            raise self._changed(i, f"size {size} → {len(data)}")
        return data

    def _compare(self, i: int, now: os.stat_result) -> None:
        if not stat.S_ISREG(now.st_mode):
            raise self._changed(i, _NOT_REGULAR)
        size, mtime_ns = int(self._index.sizes[i]), int(self._index.mtimes_ns[i])
        if now.st_size != size:
            raise self._changed(i, f"size {size} → {now.st_size}")
        if now.st_mtime_ns != mtime_ns:
            raise self._changed(i, f"modified {_time(mtime_ns)} → {_time(now.st_mtime_ns)}")

    def _changed(self, i: int, how: str) -> DatasetError:
        return DatasetError(f"{self._index.shown_full(i)}: changed since it was indexed: {how}; {_REMEDY}")


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


@dataclass(frozen=True)
class Kind:
    """What a source consists of.

    Attributes:
        root: where the data lies, absolute and without links; raises `DatasetError`.
        listing: walks through it; raises `DatasetError`.
        reader: reads single samples.
    """

    root: Callable[[Dataset], bytes]
    listing: Callable[[Dataset, Progress | None], Listing]
    reader: Callable[[Index, Decode], Source]


#: Sources by the key of `dataset:` that asks for them.
SOURCES: dict[str, Kind] = {"folder": Kind(real_root, list_folder, FileSource)}


def open_source(dataset: Dataset, index: Index, decode: Decode) -> Source:
    """The reader for an index of this data set."""
    return SOURCES[dataset.source].reader(index, decode)


def open_index(
    dataset: Dataset,
    cache_dir: Path,
    *,
    reindex: bool = False,
    progress: Progress | None = None,
) -> Index:
    """The data set's index: the cached one, if nothing has changed since that shows in what it watches, else a new one.

    Where the cache cannot be written the index lies in memory and one of its notices says so. The data set itself is
    never written to.

    Args:
        reindex: build a new one in any case.
        progress: called now and then with (samples done, samples in all; 0 while that is unknown) during a build.

    Raises:
        DatasetError: the data set cannot be listed, or has no samples, or an empty class.
    """
    kind = SOURCES[dataset.source]
    root = kind.root(dataset)
    key = _key(dataset, root)
    file = cache_dir / f"{key[:32]}.index"
    if not reindex and (index := _cached(file, key)):
        return index
    listing = kind.listing(dataset, progress)
    try:
        _refuse_inside(file, dataset)
        return Index.write(listing, file, key)
    except OSError as error:
        reason = f"{shown(os.fsencode(cache_dir))}: {error.strerror or error}"
        listing.notices.append(f"the index is kept in memory only, and built again at each start: {reason}")
        return Index.in_memory(listing, key)


def _cached(file: Path, key: str) -> Index | None:
    index = Index.open(file, key)
    if index is None:
        return None
    if (changed := index.changed()) is None:
        return index
    log.info("%s has changed since the data set was indexed", shown(changed))
    index.close()
    return None


def _refuse_inside(file: Path, dataset: Dataset) -> None:
    """What lies in a folder is its data set; what lies beside the files of a list, or beside tars, is not."""
    if dataset.folder is not None and Path(os.path.realpath(file.parent)).is_relative_to(
        os.path.realpath(dataset.folder)
    ):
        raise OSError("it lies in the data set, which is never written to")


def _key(dataset: Dataset, root: bytes) -> str:
    """Names a listing: another root, or other options, is another listing."""
    options = dataset.plain() | {"root": root.hex(), "version": VERSION}
    if dataset.source == "folder":
        options["folder"] = "root"  # whichever way leads to it
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode("ascii")).hexdigest()
