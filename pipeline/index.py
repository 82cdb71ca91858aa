"""The index: a data set's listing as one file of flat arrays, mapped by every process that needs it.

    magic, version, length and SHA-256 of the meta        48 bytes
    meta                                                  JSON: root, classes, notices, fingerprint, sections
    then, each on a 64-byte border
      paths, offsets                uint8 [..], int64 [N+1]      relative to the root
      sizes, mtimes_ns, labels      int64 [N]
      folders, folder_offsets       uint8 [..], int64 [F+1]      what was walked,
      folder_mtimes_ns              int64 [F]                    and its state then: how a stale index is noticed

All little-endian. A file is written beside its place and renamed into it, never changed in place, so a mapping stays
good while another process builds a newer one. Where no file can be written the same bytes lie in a sealed memfd.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

VERSION = 1
_MAGIC = b"headrace"
_HEAD = 48
_ALIGN = 64
_META_LIMIT = 1 << 28
_READ = 1 << 22
_PARTIAL = ".partial"
_ABANDONED = 600  # seconds after which nobody is writing a partial file any more
_STAT_THREADS = 16  # the folders' mtimes are asked for at once: on a network disk each answer takes a round trip

#: A folder modified this recently may be modified again without its mtime moving (a tick of the kernel's clock), so
#: its mtime proves nothing.
RACY_NS = 100_000_000
_UNPROVEN = -1

_DTYPES: dict[str, np.dtype[Any]] = {
    "paths": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
    "sizes": np.dtype("<i8"),
    "mtimes_ns": np.dtype("<i8"),
    "labels": np.dtype("<i8"),
    "folders": np.dtype("u1"),
    "folder_offsets": np.dtype("<i8"),
    "folder_mtimes_ns": np.dtype("<i8"),
}


@dataclass(slots=True)
class Paths:
    """Many paths as one blob: path i is `blob[offsets[i]:offsets[i + 1]]`. Any byte may occur in them.

    Attributes:
        blob: all paths, one behind the other.
        offsets: int64 [N+1], growing.
    """

    blob: bytes
    offsets: Ints

    @classmethod
    def of(cls, paths: Sequence[bytes]) -> Paths:
        offsets = np.zeros(len(paths) + 1, np.int64)
        np.cumsum([len(p) for p in paths], out=offsets[1:])
        return cls(b"".join(paths), offsets)

    @classmethod
    def joined(cls, parts: Sequence[Paths]) -> Paths:
        """Several of them, one behind the other."""
        offsets = np.zeros(1 + sum(map(len, parts)), np.int64)
        np.cumsum(np.concatenate([offsets[:0], *(np.diff(p.offsets) for p in parts)]), out=offsets[1:])
        return cls(b"".join(p.blob for p in parts), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def first(self, count: int | None) -> Paths:
        """The first so many of them; None: all."""
        if count is None or count >= len(self):
            return self
        offsets = self.offsets[: count + 1]
        return Paths(self.blob[: int(offsets[-1])], offsets)


@dataclass(slots=True)
class Listing:
    """What a walk through a data set has found; the index is its form on disk.

    Attributes:
        root: absolute, without links.
        classes: names by label.
        paths: of the samples, relative to the root, in the order of the listing.
        sizes, mtimes_ns, labels: int64 [N].
        folders: every folder that was listed, relative to the root (which is empty).
        folder_mtimes_ns: int64 [F], from just before each was listed.
        counts: what was left out: kind → number.
        notices: the same for people, a sentence each.
    """

    root: bytes
    classes: list[str]
    paths: Paths
    sizes: Ints
    mtimes_ns: Ints
    labels: Ints
    folders: Paths
    folder_mtimes_ns: Ints
    counts: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """SHA-256, hex, of relative paths, sizes, labels and class names. Neither root nor mtimes go in, so that
        copies of a data set, and other mounts of it, agree."""
        digest = hashlib.sha256(json.dumps([len(self.paths), self.classes], separators=(",", ":")).encode("ascii"))
        for array in (self.paths.offsets, self.sizes, self.labels):
            digest.update(np.ascontiguousarray(array, "<i8").data)
        digest.update(self.paths.blob)
        return digest.hexdigest()


def settled(mtime_ns: int, now_ns: int) -> int:
    """A folder's mtime as it may be compared later: one too fresh to prove anything becomes one that never matches."""
    return mtime_ns if abs(now_ns - mtime_ns) > RACY_NS else _UNPROVEN


def shown(path: bytes) -> str:
    r"""A path on one line: `\t`, `\n`, `\\`, and `\xHH` for bytes that are not UTF-8."""
    escaped = path.replace(b"\\", b"\\\\").replace(b"\t", b"\\t").replace(b"\n", b"\\n")
    return escaped.decode("utf-8", "backslashreplace")


class Index:
    """A mapped index. Make it with `write`, `in_memory`, `open` or `map`.

    Attributes:
        root: absolute path of the data set.
        classes: names by label.
        data_fingerprint: of paths, sizes, labels and class names.
        notices: what the listing left out, and what else is to be said, a sentence each.
        counts: what was left out: kind → number.
        sizes, mtimes_ns, labels: int64 [N], read-only, mapped.
        fd: of the file or memfd, for other processes to map.
        file: where it lies; None if only in memory.
    """

    root: bytes
    classes: list[str]
    data_fingerprint: str
    notices: list[str]
    counts: dict[str, int]
    sizes: Ints
    mtimes_ns: Ints
    labels: Ints

    def __init__(self, fd: int, file: Path | None = None) -> None:
        """
        Args:
            fd: of a whole index; owned from now on, also when this fails.

        Raises:
            ValueError: it is none: damaged, cut, or of another version.
        """
        self.fd = fd
        self.file = file
        try:
            meta, body, size = _read_head(fd)
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(fd)
            raise
        self._buffer = memoryview(self._map)
        self.key = str(meta["key"])
        self.root = bytes.fromhex(meta["root"])
        self.classes = list(meta["classes"])
        self.data_fingerprint = str(meta["fingerprint"])
        self.notices = list(meta["notices"])
        self.counts = dict(meta["counts"])
        self._checksum = int(meta["crc32"])
        self._body = body
        arrays = {
            name: np.ndarray((length // _DTYPES[name].itemsize,), _DTYPES[name], self._buffer, body + at)
            for name, (at, length) in meta["sections"].items()
        }
        self.sizes, self.mtimes_ns, self.labels = arrays["sizes"], arrays["mtimes_ns"], arrays["labels"]
        self._paths, self._offsets = arrays["paths"].data, arrays["offsets"]
        self._folders, self._folder_offsets = arrays["folders"].data, arrays["folder_offsets"]
        self._folder_mtimes_ns = arrays["folder_mtimes_ns"]

    @classmethod
    def map(cls, fd: int) -> Index:
        """The index behind a descriptor received from another process; owns the descriptor.

        Raises:
            ValueError: it is no index of this version.
        """
        return cls(fd)

    @classmethod
    def open(cls, file: Path, key: str) -> Index | None:
        """The index in a file, or None where there is none to be trusted: it belongs to another user or another
        listing, was written by another version, is cut or damaged."""
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            index = cls(fd, file)
        except (ValueError, OSError):
            return None
        if os.fstat(fd).st_uid == os.geteuid() and index.key == key and index._intact():
            return index
        index.close()
        return None

    @classmethod
    def write(cls, listing: Listing, file: Path, key: str) -> Index:
        """Write the listing into a file, replacing what is there at once or not at all, and open it.

        Raises:
            OSError: it cannot be written.
        """
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(file)
        fd, partial = tempfile.mkstemp(prefix=f".{file.stem}.", suffix=_PARTIAL, dir=file.parent)
        try:
            _write_all(fd, listing, key)
            os.rename(partial, file)
        except BaseException:
            os.close(fd)
            os.unlink(partial)
            raise
        return cls(_read_only(fd), file)

    @classmethod
    def in_memory(cls, listing: Listing, key: str) -> Index:
        """The same in a memfd."""
        fd = os.memfd_create("headrace-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _write_all(fd, listing, key)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(fd)
            raise
        return cls(_read_only(fd))

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, i: int) -> bytes:
        """Of sample i, relative to the root."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return bytes(self._paths[int(self._offsets[i]) : int(self._offsets[i + 1])])

    def full_path(self, i: int) -> bytes:
        return os.path.join(self.root, self.path(i))

    def shown(self, i: int) -> str:
        r"""The relative path on one line, as `headrace ls` prints it: `\t`, `\n`, `\\`, `\xHH`."""
        return shown(self.path(i))

    def shown_full(self, i: int) -> str:
        """The same with the root."""
        return shown(self.full_path(i))

    def changed_folder(self) -> bytes | None:
        """A folder whose mtime is not what it was when the listing was made, if there is one: a name came or went.

        Costs one `stat` per folder. Files that changed in place do not show here, but when they are read.
        """
        with ThreadPoolExecutor(_STAT_THREADS, "headrace-index") as pool:
            now = pool.map(_mtime_ns, self._watched(), chunksize=64)
            for folder, then, mtime_ns in zip(self._watched(), self._folder_mtimes_ns.tolist(), now, strict=True):
                if then != mtime_ns:
                    pool.shutdown(cancel_futures=True)
                    return folder
        return None

    def close(self) -> None:
        """Unmap and close; arrays that are still held keep the mapping alive. May be called twice."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        del self.sizes, self.mtimes_ns, self.labels, self._folder_mtimes_ns
        del self._paths, self._offsets, self._folders, self._folder_offsets
        del self._buffer, self._map

    def _watched(self) -> Iterator[bytes]:
        offsets = self._folder_offsets.tolist()
        for begin, end in zip(offsets, offsets[1:], strict=False):
            yield os.path.join(self.root, bytes(self._folders[begin:end]))

    def _intact(self) -> bool:
        """Whether the arrays are what was written. Read, not mapped, so that it leaves no pages with this process."""
        crc, at = 0, self._body
        while data := os.pread(self.fd, _READ, at):
            crc = zlib.crc32(data, crc)
            at += len(data)
        return crc == self._checksum


def _sweep(file: Path) -> None:
    """Remove what writers of this file left that were killed; one that is at work is younger."""
    for partial in file.parent.glob(f".{file.stem}.*{_PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > _ABANDONED:
                partial.unlink()


def _mtime_ns(folder: bytes) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def _round_up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _read_only(fd: int) -> int:
    """Exchange a descriptor for a read-only one: kernels before 6.7 map a write-sealed memfd through no other."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _write_all(fd: int, listing: Listing, key: str) -> None:
    sections: dict[str, tuple[int, int]] = {}
    parts: list[bytes | memoryview] = []
    at = crc = 0
    for name, values in _arrays(listing).items():
        data = np.ascontiguousarray(values, _DTYPES[name]).data.cast("B")
        sections[name] = (at, data.nbytes)
        padding = bytes(_round_up(data.nbytes) - data.nbytes)
        parts += [data, padding]
        crc = zlib.crc32(padding, zlib.crc32(data, crc))
        at += data.nbytes + len(padding)
    meta = json.dumps(
        {
            "key": key,
            "root": listing.root.hex(),
            "classes": listing.classes,
            "fingerprint": listing.fingerprint(),
            "notices": listing.notices,
            "counts": listing.counts,
            "sections": sections,
            "body": at,
            "crc32": crc,
        }
    ).encode("ascii")
    head = _MAGIC + VERSION.to_bytes(4, "little") + len(meta).to_bytes(4, "little") + hashlib.sha256(meta).digest()
    with open(fd, "wb", closefd=False) as file:
        file.write(head)
        file.write(meta)
        file.write(bytes(_round_up(_HEAD + len(meta)) - _HEAD - len(meta)))
        for part in parts:
            file.write(part)


def _arrays(listing: Listing) -> dict[str, NDArray[Any]]:
    return {
        "paths": np.frombuffer(listing.paths.blob, np.uint8),
        "offsets": listing.paths.offsets,
        "sizes": listing.sizes,
        "mtimes_ns": listing.mtimes_ns,
        "labels": listing.labels,
        "folders": np.frombuffer(listing.folders.blob, np.uint8),
        "folder_offsets": listing.folders.offsets,
        "folder_mtimes_ns": listing.folder_mtimes_ns,
    }


def _read_head(fd: int) -> tuple[dict[str, Any], int, int]:
    """`(meta, where the sections begin, size of the file)`, all lengths checked against each other."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, _HEAD, 0)
    if len(head) < _HEAD or not head.startswith(_MAGIC):
        raise ValueError("not an index")
    version, length = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
    if version != VERSION:
        raise ValueError(f"an index of version {version}, not {VERSION}")
    text = os.pread(fd, length, _HEAD) if length <= _META_LIMIT else b""
    if len(text) != length or hashlib.sha256(text).digest() != head[16:48]:
        raise ValueError("a damaged index")
    meta: dict[str, Any] = json.loads(text)
    body = _round_up(_HEAD + length)
    if size != body + meta["body"]:
        raise ValueError(f"a cut index: {size} bytes, not {body + meta['body']}")
    _check_sections(meta["sections"], meta["body"])
    return meta, body, size


def _check_sections(sections: dict[str, Any], body: int) -> None:
    lengths = {}
    for name, dtype in _DTYPES.items():
        at, nbytes = sections[name]
        if at % _ALIGN or at < 0 or nbytes < 0 or at + nbytes > body:
            raise ValueError(f"a damaged index: section {name}")
        lengths[name] = nbytes // dtype.itemsize
    samples, folders = lengths["sizes"], lengths["folder_mtimes_ns"]
    if not (
        lengths["mtimes_ns"] == lengths["labels"] == lengths["offsets"] - 1 == samples
        and lengths["folder_offsets"] - 1 == folders
    ):
        raise ValueError("a damaged index: sections of unequal lengths")
