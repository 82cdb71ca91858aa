"""What the workers of a stream have found out about its samples, so that none has to do so again.

A byte per sample, in anonymous memory that all workers share; 0 as long as nothing is known. Any other says that the
sample is a JPEG which was decoded as a whole and found good, with its orientation in the low bits and maybe `PARTS`.
Bits are only ever set, each worker that has seen the proof sets the same, and one that is lost is found out again: no
lock is needed. Whoever reads a sample makes sure that it is still the one that was listed.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

#: The bits of the EXIF orientation, 1 to 8.
ORIENTATION = 0x0F
#: DALI has decoded all of it, and may decode a part of it alone.
PARTS = 0x10


def create(samples: int) -> int:
    """A descriptor of flags, none of them set, for a stream of so many samples.

    Raises:
        OSError: memory or descriptors do not suffice.
    """
    fd = os.memfd_create("headrace-wholes", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(samples, 1))
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, samples: int) -> NDArray[np.uint8]:
    """The flags, uint8 [samples], shared with everybody who has attached. The descriptor is taken over.

    Raises:
        OSError: they cannot be mapped.
    """
    try:
        return np.frombuffer(mmap.mmap(fd, max(samples, 1)), np.uint8, samples)
    finally:
        os.close(fd)
