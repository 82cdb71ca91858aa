"""One poll loop over ZeroMQ sockets and file descriptors, with a callback for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

#: A ZeroMQ socket, a descriptor, or an object that has one.
Watched = Any


class Loop:
    """Level-triggered: a callback that leaves something to read is called again."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._callbacks: dict[Watched, Callable[[], None]] = {}

    def watch(self, what: Watched, callback: Callable[[], None], *, write: bool = False) -> None:
        """Call back when `what` can be read (and written, if asked). Watching it again changes the flags."""
        key = self._key(what)
        self._poller.register(key, zmq.POLLIN | (zmq.POLLOUT if write else 0))
        self._callbacks[key] = callback

    def unwatch(self, what: Watched) -> None:
        """Forget it; to be called before its descriptor is closed. Unknown ones are ignored."""
        key = self._key(what)
        if self._callbacks.pop(key, None) is not None:
            self._poller.unregister(key)

    def run_once(self, timeout: float) -> None:
        """Wait at most `timeout` seconds, then call back for everything that is ready and still watched."""
        before = self._callbacks.copy()
        for key, _ in self._poller.poll(int(timeout * 1000)):
            # One that was watched since has taken over a closed one's descriptor: what was ready is not it.
            callback = self._callbacks.get(key)
            if callback is not None and callback is before.get(key):
                callback()

    @staticmethod
    def _key(what: Watched) -> Watched:
        return what if isinstance(what, zmq.Socket | int) else what.fileno()
