"""Signals as something to poll."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from types import FrameType


class Signals:
    """SIGTERM and SIGINT, from the main thread's poll loop.

    Args:
        called: with the signal's number, from the handler.
    """

    def __init__(self, called: Callable[[int], None]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._called = called
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}

    def fileno(self) -> int:
        """Readable after a signal, until `drain`."""
        return self._reader.fileno()

    def drain(self) -> None:
        self._reader.recv(4096)

    def restore(self) -> None:
        """Put back the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._called(number)
