"""The memory that batches are written into: the caller's for good, and yet not fresh each time.

A page that the kernel has just handed out costs a fault and a clearing when it is first written, which for a batch of
154 MB is as dear as finishing it. So large memory comes back here, but only once nothing refers to it any more, which
is known and not guessed: every array and tensor over a batch holds, however indirectly, one NumPy array of ours, the
*base*, and the base's end is what returns the memory. NumPy lets a view of a view refer to the oldest array of the
chain; the base lies directly on a buffer that is no array, so the chain ends at it and cannot skip it. An array takes
no part in garbage collection, so its end is always its last reference's, and nothing can bring it back to life.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Below this many bytes malloc is as good, and a mapping of its own would waste the rest of a page.
_SMALL = 1 << 18


_Ref = weakref.ref[NDArray[np.uint8]]
_Raw = Any  # mmap.mmap, or an array of ctypes, which NumPy takes and its types do not know


class BatchMemory:
    """A source of equally large pieces of memory that takes them back when they are dropped.

    Used by one thread; what it gave out may be dropped in any thread, and after the source itself.

    Args:
        size: bytes of a piece.
        idle: pieces kept for reuse at most, None: all; those beyond go back to where they came from when the next one
            is taken.
        fresh: gives a new piece, an array (size,) of uint8, or raises MemoryError; None: of the kernel's.
    """

    def __init__(self, size: int, idle: int | None, fresh: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self._size = size
        self._small = fresh is None and size < _SMALL
        self._fresh = fresh
        self._idle: deque[_Raw] = deque(maxlen=idle)
        self._lent: dict[int, tuple[_Ref, _Raw]] = {}
        #: References to bases that have ended. Appended by C code alone: a callback in Python would be a place where
        #: a signal's handler may run, and whatever that raises, a KeyboardInterrupt too, would be lost there.
        self._dropped: deque[_Ref] = deque()

    @property
    def pieces(self) -> int:
        """How many there are, lent and idle."""
        return len(self._lent) + len(self._idle)

    def take(self) -> NDArray[np.uint8]:
        """A writable piece, uint8 (size,); its content is arbitrary.

        Raises:
            MemoryError: there is none.
        """
        if self._small:
            return np.empty(self._size, np.uint8)
        while self._dropped:
            self._idle.append(self._lent.pop(id(self._dropped.popleft()))[1])
        try:
            raw = self._idle.pop()
        except IndexError:
            raw = _map(self._size) if self._fresh is None else _no_array(self._fresh(self._size))
        base: NDArray[np.uint8] = np.ndarray((self._size,), np.uint8, raw)
        assert base.base is raw  # else what is laid over the base would not refer to it
        ref = weakref.ref(base, self._dropped.append)
        self._lent[id(ref)] = ref, raw
        return base


def _no_array(piece: Any) -> ctypes.Array[ctypes.c_uint8]:
    """The same memory, kept, as a buffer that is no array, nor a memoryview, behind which NumPy sees the array."""
    kind: type[ctypes.Array[ctypes.c_uint8]] = ctypes.c_uint8 * piece.nbytes
    return kind.from_buffer(piece)


def _map(size: int) -> mmap.mmap:
    # Private: a shared anonymous mapping is a file in memory, and a forked child would write into its parent's.
    try:
        raw = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a batch of {size} bytes: {error}; use a smaller batch or prefetch") from error
    try:
        raw.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    return raw
