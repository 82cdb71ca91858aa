"""The ring of equal slots in anonymous shared memory: where a chunk's bytes lie.

One segment per stream, a memfd: it has no name, so nothing can collide or be left over, no container limit on
/dev/shm applies, and the kernel frees it with the last process. A slot holds one chunk:

    offset 0    header, 64 bytes; its first word is the slot's generation
    then        images   uint8 [chunk, height, width, 3]
                labels   int64 or float32 [chunk], or [chunk, width]
                indices  int64 [chunk]      line of the sample in the listing
                status   uint8 [chunk]      a `Status` per row
                ends     int64 [chunk]      where each row's text ends in
                text     uint8 [..]         MessagePack arrays, one a row: the label if it is text, then further columns

each field on a 64-byte border, each slot on a page border. The daemon creates the ring and alone writes
generations; workers write the fields; clients get a read-only descriptor.

A word that another process reads without a lock is written through a typed view, never with `struct.pack_into`,
which zero-fills the field first.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

_ALIGN = 64
_HEADER = 64
PAGE = mmap.PAGESIZE

LabelDtype = Literal["int64", "float32"]


class Status(enum.IntEnum):
    """What a row of a chunk holds."""

    PENDING = 0  # not begun
    RENDERING = 1  # a worker is at it; if the worker dies, this row is a suspect
    OK = 2  # a picture
    REJECTED = 3  # black; the picture's content is bad and the chunk's reply says why
    READ = 4  # its bytes are here and look like a picture


class SlotLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the fields of a slot lie; a few numbers that travel in the handshake.

    Attributes:
        chunk: rows of a slot.
        height: of every picture, in pixels.
        width: likewise.
        label_dtype: of the numeric labels.
        label_width: numbers of a label that is a vector; 0 for labels that are one number each.
        text: bytes for the texts of a chunk's rows: as many as any chunk of the listing may need, in any order.
    """

    chunk: Annotated[int, Meta(ge=1, le=1 << 16)]
    height: Annotated[int, Meta(ge=1, le=1 << 16)]
    width: Annotated[int, Meta(ge=1, le=1 << 16)]
    label_dtype: LabelDtype = "int64"
    label_width: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    text: Annotated[int, Meta(ge=0, le=1 << 40)] = 0

    def chunks(self, samples: int) -> int:
        """Of an epoch of so many positions."""
        return -(-samples // self.chunk)

    def rows(self, samples: int, chunk: int) -> int:
        """Positions in this chunk of an epoch: the last one may be short."""
        return min(self.chunk, samples - chunk * self.chunk)

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        return self.chunk, self.height, self.width, 3

    @property
    def image_bytes(self) -> int:
        """Of one picture."""
        return self.height * self.width * 3

    @property
    def label_shape(self) -> tuple[int, ...]:
        return (self.chunk, self.label_width) if self.label_width else (self.chunk,)

    @property
    def fields(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]:
        """`name: (dtype, shape, offset within the slot)`, in order."""
        table: dict[str, tuple[np.dtype[Any], tuple[int, ...], int]] = {}
        offset = _HEADER
        for name, dtype, shape in (
            ("images", np.dtype(np.uint8), self.image_shape),
            ("labels", np.dtype(self.label_dtype), self.label_shape),
            ("indices", np.dtype(np.int64), (self.chunk,)),
            ("status", np.dtype(np.uint8), (self.chunk,)),
            ("ends", np.dtype(np.int64), (self.chunk,)),
            ("text", np.dtype(np.uint8), (self.text,)),
        ):
            table[name] = (dtype, shape, offset)
            offset += _round_up(dtype.itemsize * int(np.prod(shape)), _ALIGN)
        return table

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next, a whole number of pages."""
        dtype, shape, offset = self.fields["text"]
        return _round_up(offset + dtype.itemsize * int(np.prod(shape)), PAGE)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class SlotView:
    """The fields of one slot as NumPy arrays over the mapping; valid while the ring is open."""

    __slots__ = ("ends", "images", "indices", "labels", "status", "text")

    images: NDArray[np.uint8]
    labels: NDArray[Any]
    indices: NDArray[np.int64]
    status: NDArray[np.uint8]
    ends: NDArray[np.int64]
    text: NDArray[np.uint8]

    def __init__(self, buffer: memoryview, layout: SlotLayout, offset: int) -> None:
        for name, (dtype, shape, at) in layout.fields.items():
            setattr(self, name, np.ndarray(shape, dtype, buffer, offset + at))


class Ring:
    """A mapping of the segment. Make it with `create` (the daemon) or `attach` (everybody else)."""

    def __init__(self, fd: int, layout: SlotLayout, slots: int, *, writable: bool) -> None:
        self.layout = layout
        self.slots = slots
        self.nbytes = layout.stride * slots
        self.reserved = 0
        self.fd = fd
        try:
            if os.fstat(fd).st_size != self.nbytes:
                raise ValueError(f"the segment has {os.fstat(fd).st_size} bytes, {slots} slots need {self.nbytes}")
            self._map = mmap.mmap(fd, self.nbytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        except BaseException:
            os.close(fd)
            raise
        self._buffer = memoryview(self._map)
        #: uint64 [slots], strided over the headers.
        self.generation: NDArray[np.uint64] = np.ndarray((slots,), np.uint64, self._buffer, strides=(layout.stride,))
        self.views = [SlotView(self._buffer, layout, i * layout.stride) for i in range(slots)]

    @classmethod
    def create(cls, layout: SlotLayout, slots: int) -> Ring:
        """A new ring, its memory reserved.

        Raises:
            OSError: (ENOSPC, ENOMEM) the memory is not to be had.
        """
        ring = cls.begin(layout, slots)
        try:
            ring.reserve(ring.nbytes)
        except BaseException:
            ring.close()
            raise
        return ring

    @classmethod
    def begin(cls, layout: SlotLayout, slots: int) -> Ring:
        """A new ring that is good for use once `reserve` has reserved all of it.

        Raises:
            OSError: the address space or the descriptors do not suffice.
        """
        fd = os.memfd_create("headrace-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o400)  # a client must not turn its read-only descriptor into a writable one through /proc
            os.ftruncate(fd, layout.stride * slots)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, layout, slots, writable=True)

    def reserve(self, nbytes: int) -> bool:
        """Reserve so many bytes more; whether that was all. A whole ring takes a second for some 4 GB.

        A page first touched in the middle of an epoch would be charged then, or get somebody killed then. With the
        last byte the segment is sealed against any change of its size.

        Raises:
            OSError: (ENOSPC, ENOMEM) the memory is not to be had.
        """
        step = min(nbytes, self.nbytes - self.reserved)
        os.posix_fallocate(self.fd, self.reserved, step)
        self.reserved += step
        if self.reserved < self.nbytes:
            return False
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return True

    @classmethod
    def attach(cls, fd: int, layout: SlotLayout, slots: int, *, writable: bool = False) -> Ring:
        """Map a ring whose descriptor was received. The descriptor is taken over, and closed if this fails.

        Raises:
            ValueError: the segment has another size than these slots need, or might shrink, which kills who reads it.
            OSError: it is no such segment, or cannot be mapped that way; a read-only descriptor never for writing.
        """
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("the segment is not sealed against becoming smaller")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, layout, slots, writable=writable)

    def read_only_fd(self) -> int:
        """A new descriptor of the same segment that cannot be mapped for writing."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap and close. Any view still held keeps the mapping alive until it is dropped. May be called twice."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.views = []
        del self.generation
        del self._buffer
        del self._map
