"""What one thread rings and another waits at."""

from __future__ import annotations

import os
import select


class Bell:
    """An eventfd. It is closed with the last reference: who waits at it never waits at a descriptor of other people's.

    Attributes:
        fd: readable once the bell was rung, until `clear`.
    """

    fd = -1

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def ring(self) -> None:
        if self.fd >= 0:  # or both are garbage, and the bell went first
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def wait(self, seconds: float | None) -> bool:
        """Whether it is rung before so much time is over; it is cleared then."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        rung = bool(poll.poll(None if seconds is None else 1000 * seconds))
        self.clear()
        return rung
