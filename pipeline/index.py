"""The index: a data set's listing as one file of flat arrays, mapped by every process that needs it.

    magic, version, length and SHA-256 of the meta        48 bytes
    meta                                                  JSON: root, classes, columns, notices, fingerprint, sections
    then, each on a 64-byte border
      paths, offsets                uint8 [..], int64 [N+1]      relative to the root
      sizes, mtimes_ns              int64 [N]
      labels                        int64 or float32 [N], or [N, width]; or int64 [..] with
      label_offsets                 int64 [N+1]                  where each sample's classes end in it
      texts, text_offsets           uint8 [..], int64 [N+1]      MessagePack arrays: a label that is text, then columns
      container, positions          int64 [N]                    the watched file that holds the sample, and where in it
      watched, watched_offsets      uint8 [..], int64 [W+1]      what was walked or read,
      watched_mtimes_ns, watched_sizes   int64 [W]               and its state then: how a stale index is noticed

Sections that a listing has no use for are not there.

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
import re
import tempfile
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.slots import LabelDtype

Ints = NDArray[np.int64]

VERSION = 2
_MAGIC = b"headrace"
_HEAD = 48
_ALIGN = 64
_META_LIMIT = 1 << 28
_READ = 1 << 22
_PARTIAL = ".partial"
_ABANDONED = 600  # seconds after which nobody is writing a partial file any more
_STAT_BATCH = 64
_STAT_THREADS = 16  # what is watched is asked for its state at once: on a network disk each answer is a round trip

#: A folder or file modified this recently may be modified again without its mtime moving (a tick of the kernel's
#: clock), so its mtime proves nothing.
RACY_NS = 100_000_000
_UNPROVEN = -1

_LABEL_DTYPES: dict[LabelDtype, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}
_BYTES, _INTS = np.dtype("u1"), np.dtype("<i8")
_REQUIRED: dict[str, np.dtype[Any]] = {
    "paths": _BYTES,
    "offsets": _INTS,
    "sizes": _INTS,
    "mtimes_ns": _INTS,
    "watched": _BYTES,
    "watched_offsets": _INTS,
    "watched_mtimes_ns": _INTS,
    "watched_sizes": _INTS,
}
_OPTIONAL: dict[str, np.dtype[Any]] = {
    "label_offsets": _INTS,
    "texts": _BYTES,
    "text_offsets": _INTS,
    "container": _INTS,
    "positions": _INTS,
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

    def kept(self, keep: NDArray[np.bool_]) -> Paths:
        """Those for which `keep`, bool [N], is True."""
        lengths = np.diff(self.offsets)
        offsets = np.zeros(int(keep.sum()) + 1, np.int64)
        np.cumsum(lengths[keep], out=offsets[1:])
        return Paths(np.frombuffer(self.blob, np.uint8)[np.repeat(keep, lengths)].tobytes(), offsets)


@dataclass(slots=True)
class Labels:
    """The labels of a listing's samples.

    Attributes:
        values: int64 or float32: [N], a number each; [N, k], a vector each; with `offsets` int64, flat.
        offsets: int64 [N+1]: sample i has the classes `values[offsets[i]:offsets[i + 1]]`, any number of them. They are
            delivered as float32 [number of classes], 1 where the sample has the class.
        text: the label is the first value of each sample's text; `values` are zeros.
    """

    values: NDArray[Any]
    offsets: Ints | None = None
    text: bool = False

    @property
    def dtype(self) -> LabelDtype:
        """Of `values`."""
        return "float32" if self.values.dtype == np.float32 else "int64"

    @property
    def width(self) -> int:
        """Of `values`: numbers of a vector, 0 for numbers."""
        return self.values.shape[1] if self.values.ndim == 2 else 0

    def first(self, count: int | None) -> Labels:
        """Of the first so many samples; None: of all."""
        if count is None:
            return self
        if self.offsets is None:
            return Labels(self.values[:count], None, self.text)
        offsets = self.offsets[: count + 1]
        return Labels(self.values[: int(offsets[-1])], offsets)

    def kept(self, keep: NDArray[np.bool_]) -> Labels:
        """Of those samples for which `keep`, bool [N], is True."""
        if self.offsets is None:
            return Labels(self.values[keep], None, self.text)
        counts = np.diff(self.offsets)
        offsets = np.zeros(int(keep.sum()) + 1, np.int64)
        np.cumsum(counts[keep], out=offsets[1:])
        return Labels(self.values[np.repeat(keep, counts)], offsets)


@dataclass(slots=True)
class Listing:
    """What was found in a data set; the index is its form on disk.

    Attributes:
        root: absolute, without links.
        classes: names by label; empty where labels are no classes.
        paths: of the samples, relative to the root, in the order of the listing.
        sizes, mtimes_ns: int64 [N]. In a container the size is that of the sample's bytes, the mtime the container's.
        labels: of the samples.
        watched: what tells that the listing is stale: folders that were listed, the list file, the tars. Absolute, or
            relative to the root (which is empty).
        watched_mtimes_ns: int64 [W], from just before each was listed or read.
        watched_sizes: int64 [W], likewise; -1: not compared.
        columns: names of the further values of each sample.
        texts: for each sample a MessagePack array: the label if labels are text, then the values of `columns`.
        container: int64 [N]: number of the file in `watched` that holds the sample; None: samples are files.
        positions: int64 [N]: where in it the sample's bytes begin.
        counts: what was left out: kind → number.
        notices: the same for people, a sentence each.
    """

    root: bytes
    classes: list[str]
    paths: Paths
    sizes: Ints
    mtimes_ns: Ints
    labels: Labels
    watched: Paths
    watched_mtimes_ns: Ints
    watched_sizes: Ints
    columns: list[str] = field(default_factory=list)
    texts: Paths | None = None
    container: Ints | None = None
    positions: Ints | None = None
    counts: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """SHA-256, hex, of relative paths, sizes, labels, class names, further columns and their values. Neither root
        nor mtimes go in, so that copies of a data set, and other mounts of it, agree; nor does it matter whether the
        same samples, with one number as their label, come from folders or from a list."""
        head: list[Any] = [len(self.paths), self.classes]
        arrays: list[NDArray[Any] | None] = [self.paths.offsets, self.sizes, self.labels.values, self.labels.offsets]
        more = self.labels.dtype, self.labels.width, self.labels.offsets is not None, self.labels.text, self.columns
        if more != ("int64", 0, False, False, []):
            head.append(more)
        if self.texts is not None:
            arrays.append(self.texts.offsets)
        digest = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode("ascii"))
        for array in arrays:
            if array is not None:
                digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        digest.update(self.paths.blob)
        if self.texts is not None:
            digest.update(self.texts.blob)
        return digest.hexdigest()


def mtime_of(state: os.stat_result) -> int:
    """When a file was modified, in ns, as int64. Disks know times beyond those, before 1677 and after 2262; they wrap
    round, which leaves each other time another number."""
    return (state.st_mtime_ns + (1 << 63)) % (1 << 64) - (1 << 63)


def settled(mtime_ns: int, now_ns: int) -> int:
    """An mtime as it may be compared later: one too fresh to prove anything becomes one that never matches."""
    return mtime_ns if abs(now_ns - mtime_ns) > RACY_NS else _UNPROVEN


#: With those of two bytes in UTF-8: U+009B begins a command as ESC [ does.
_UNPRINTABLE = re.compile(rb"[\x00-\x1f\x7f\\]|\xc2[\x80-\x9f]")
_NAMED_ESCAPES = {b"\t": b"\\t", b"\n": b"\\n", b"\\": b"\\\\"}


def shown(path: bytes) -> str:
    r"""A path on one line, from which it can be had again: `\t`, `\n`, `\\`, and `\xHH` for other control characters,
    which a terminal would obey, and for bytes that are not UTF-8."""
    return _UNPRINTABLE.sub(_escape, path).decode("utf-8", "backslashreplace")


def _escape(match: re.Match[bytes]) -> bytes:
    return _NAMED_ESCAPES.get(match[0]) or b"".join(b"\\x%02x" % byte for byte in match[0])


class Index:
    """A mapped index. Make it with `write`, `in_memory`, `open` or `map`.

    Attributes:
        root: absolute path of the data set.
        classes: names by label; empty where labels are no classes.
        columns: names of the further values of each sample.
        data_fingerprint: of paths, sizes, labels, class names and further values.
        notices: what the listing left out, and what else is to be said, a sentence each.
        counts: what was left out: kind → number.
        sizes, mtimes_ns: int64 [N], read-only, mapped.
        labels: as in `Labels.values`, likewise.
        labels_text: whether the label is the first value of each sample's text.
        container, positions, watched_sizes: as in `Listing`.
        fd: of the file or memfd, for other processes to map.
        file: where it lies; None if only in memory.
    """

    root: bytes
    classes: list[str]
    columns: list[str]
    data_fingerprint: str
    notices: list[str]
    counts: dict[str, int]
    sizes: Ints
    mtimes_ns: Ints
    labels: NDArray[Any]
    labels_text: bool
    container: Ints | None
    positions: Ints | None
    watched_sizes: Ints

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
        form = meta["labels"]
        self.columns = list(meta["columns"])
        self.labels_text = bool(form["text"])
        self._label_dtype = cast(LabelDtype, form["dtype"])
        self._label_width = int(form["width"])
        self._rooms: dict[int, int] = {}
        dtypes = _dtypes(form)
        arrays: dict[str, NDArray[Any]] = {
            name: np.ndarray((length // dtypes[name].itemsize,), dtypes[name], self._buffer, body + at)
            for name, (at, length) in meta["sections"].items()
        }
        self.sizes, self.mtimes_ns, self.labels = arrays["sizes"], arrays["mtimes_ns"], arrays["labels"]
        if self._label_width:
            self.labels = self.labels.reshape(-1, self._label_width)
        self._label_offsets = arrays.get("label_offsets")
        self.container, self.positions = arrays.get("container"), arrays.get("positions")
        self._paths, self._offsets = arrays["paths"].data, arrays["offsets"]
        self._texts = arrays["texts"].data if "texts" in arrays else None
        self._text_offsets = arrays.get("text_offsets")
        self._watched, self._watched_offsets = arrays["watched"].data, arrays["watched_offsets"]
        self._watched_mtimes_ns, self.watched_sizes = arrays["watched_mtimes_ns"], arrays["watched_sizes"]

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
        if os.fstat(fd).st_uid != os.geteuid():  # nothing of it is believed, nor mapped, which its owner may cut
            os.close(fd)
            return None
        try:
            index = cls(fd, file)
        except (ValueError, OSError):
            return None
        if index.key == key and index._intact():
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
        """The relative path on one line, as `headrace ls` prints it: see `shown`."""
        return shown(self.path(i))

    def shown_full(self, i: int) -> str:
        """The same with the root."""
        return shown(self.full_path(i))

    def label_form(self) -> tuple[LabelDtype, int]:
        """dtype and width of a label as it is delivered: width 0 is one number, else a vector."""
        if self._label_offsets is not None:
            return "float32", len(self.classes)
        return self._label_dtype, self._label_width

    def fill_labels(self, indices: Ints, out: NDArray[Any]) -> None:
        """Write the labels of some samples.

        Args:
            out: of `label_form`'s dtype, (n,) or (n, width).
        """
        if self._label_offsets is None:
            out[:] = self.labels[indices]
            return
        out[:] = 0
        for row, i in enumerate(indices.tolist()):
            out[row, self._classes_of(i)] = 1

    def labels_shown(self) -> str:
        """What the labels are, for people: `3 classes`, `3 classes, several a sample`, `float32 labels`, …"""
        if self.labels_text:
            return "texts as labels"
        if self.classes:
            several = ", several a sample" if self._label_offsets is not None else ""
            return f"{len(self.classes)} classes{several}"
        dtype, width = self.label_form()
        return f"{dtype} labels" + (f" of {width} numbers" if width else "")

    def label_shown(self, i: int) -> str:
        """The label of sample i on one line, as `headrace ls` prints it: its number; commas between those of a vector,
        or of several classes; a text as a path is shown."""
        if self.labels_text:
            return shown(str(msgspec.msgpack.decode(self.text_row(i))[0]).encode("utf-8", "surrogatepass"))
        value = self.labels[i] if self._label_offsets is None else self._classes_of(i)
        return ",".join(map(str, np.atleast_1d(value)))

    def text_row(self, i: int) -> bytes:
        """The MessagePack array of sample i: the label if it is text, then the values of `columns`; empty where the
        listing has neither."""
        if self._texts is None or self._text_offsets is None:
            return b""
        return bytes(self._texts[int(self._text_offsets[i]) : int(self._text_offsets[i + 1])])

    def text_room(self, chunk: int) -> int:
        """Bytes of the texts of any `chunk` samples, at most."""
        if self._text_offsets is None:
            return 0
        if chunk not in self._rooms:
            lengths = np.diff(self._text_offsets)
            if chunk < len(lengths):
                lengths = np.partition(lengths, len(lengths) - chunk)[-chunk:]
            self._rooms[chunk] = int(lengths.sum())
        return self._rooms[chunk]

    def watched_path(self, k: int) -> bytes:
        """The full path of what is watched."""
        path = bytes(self._watched[int(self._watched_offsets[k]) : int(self._watched_offsets[k + 1])])
        return os.path.join(self.root, path)

    def find(self, path: str, size: int, mtime_ns: int) -> list[int]:
        """Samples that are this file: those of a list may name one several times.

        Args:
            path: as `shown` gives it.
        """
        alike = np.flatnonzero((self.sizes == size) & (self.mtimes_ns == mtime_ns)).tolist()
        return [i for i in alike if self.shown(i) == path]

    def repeats(self, i: int) -> list[int]:
        """All samples that are the same file as sample i, itself among them."""
        return self.find(self.shown(i), int(self.sizes[i]), int(self.mtimes_ns[i]))

    def changed(self) -> bytes | None:
        """Something watched whose mtime or size is not what it was when the listing was made, if there is any: in a
        folder a name came or went, a list or a tar is another one.

        Costs one `stat` for each. Files that changed in place do not show here, but when they are read.
        """
        with ThreadPoolExecutor(_STAT_THREADS, "headrace-index") as pool:
            for found in pool.map(self._changed_of, range(0, len(self.watched_sizes), _STAT_BATCH)):
                if found is not None:
                    pool.shutdown(cancel_futures=True)
                    return found
        return None

    def _changed_of(self, first: int) -> bytes | None:
        """The same among a batch, the first of which has this number."""
        some = slice(first, first + _STAT_BATCH)
        then = zip(self._watched_mtimes_ns[some].tolist(), self.watched_sizes[some].tolist(), strict=True)
        for k, (mtime_ns, size) in enumerate(then, first):
            path = self.watched_path(k)
            now = _state(path)
            if now is None or mtime_ns != now[0] or size not in (-1, now[1]):
                return path
        return None

    def close(self) -> None:
        """Unmap and close; arrays that are still held keep the mapping alive. May be called twice."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        del self.sizes, self.mtimes_ns, self.labels, self._label_offsets, self.container, self.positions
        del self._paths, self._offsets, self._texts, self._text_offsets
        del self._watched, self._watched_offsets, self._watched_mtimes_ns, self.watched_sizes
        del self._buffer, self._map

    def _classes_of(self, i: int) -> Ints:
        assert self._label_offsets is not None
        classes: Ints = self.labels[int(self._label_offsets[i]) : int(self._label_offsets[i + 1])]
        return classes

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


def _state(path: bytes) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return mtime_of(state), state.st_size


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
    labels = listing.labels
    form = {"dtype": labels.dtype, "width": labels.width, "text": labels.text}
    dtypes = _dtypes(form)
    for name, values in _arrays(listing).items():
        data = np.ascontiguousarray(values, dtypes[name]).reshape(-1).view(np.uint8).data
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
            "columns": listing.columns,
            "labels": form,
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


def _dtypes(form: dict[str, Any]) -> dict[str, np.dtype[Any]]:
    """Of every section that there may be."""
    return _REQUIRED | _OPTIONAL | {"labels": _LABEL_DTYPES[form["dtype"]]}


def _arrays(listing: Listing) -> dict[str, NDArray[Any]]:
    texts = listing.texts
    arrays: dict[str, NDArray[Any] | None] = {
        "paths": np.frombuffer(listing.paths.blob, np.uint8),
        "offsets": listing.paths.offsets,
        "sizes": listing.sizes,
        "mtimes_ns": listing.mtimes_ns,
        "labels": listing.labels.values,
        "label_offsets": listing.labels.offsets,
        "texts": None if texts is None else np.frombuffer(texts.blob, np.uint8),
        "text_offsets": None if texts is None else texts.offsets,
        "container": listing.container,
        "positions": listing.positions,
        "watched": np.frombuffer(listing.watched.blob, np.uint8),
        "watched_offsets": listing.watched.offsets,
        "watched_mtimes_ns": listing.watched_mtimes_ns,
        "watched_sizes": listing.watched_sizes,
    }
    return {name: array for name, array in arrays.items() if array is not None}


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
    _check_sections(meta)
    return meta, body, size


def _check_sections(meta: dict[str, Any]) -> None:
    body, dtypes = meta["body"], _dtypes(meta["labels"])
    lengths: dict[str, int] = {}
    for name, (at, nbytes) in meta["sections"].items():
        if name not in dtypes or at % _ALIGN or at < 0 or nbytes < 0 or at + nbytes > body:
            raise ValueError(f"a damaged index: section {name}")
        lengths[name] = nbytes // dtypes[name].itemsize
    if missing := {*_REQUIRED, "labels"} - lengths.keys():
        raise ValueError(f"a damaged index: no section {', '.join(sorted(missing))}")
    samples, watched = lengths["sizes"], lengths["watched_sizes"]
    labels = lengths["labels"] if "label_offsets" in lengths else samples * max(1, meta["labels"]["width"])
    expected = {
        "mtimes_ns": samples,
        "labels": labels,
        "offsets": samples + 1,
        "label_offsets": samples + 1,
        "text_offsets": samples + 1,
        "container": samples,
        "positions": samples,
        "watched_offsets": watched + 1,
        "watched_mtimes_ns": watched,
    }
    if any(lengths.get(name, length) != length for name, length in expected.items()):
        raise ValueError("a damaged index: sections of unequal lengths")
