"""Which samples were decoded as a whole and found good, so that a part of them may be decoded alone.

A byte per sample of a stream, in anonymous memory that all its workers share. A byte only ever goes from 0 to 1, and
each worker that has seen the proof writes the same, so no lock is needed.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray


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
