"""A stretch of network for tests: forwards connections to a port, and cuts, stops or slows them on cue."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field


@dataclass(eq=False)
class Stretch:
    """One connection: its two sockets, and what is on its way to the second one of each pair."""

    client: socket.socket
    server: socket.socket
    held: bool = False
    brought: int = 0
    cut: threading.Event = field(default_factory=threading.Event)

    def hold(self) -> None:
        """From now on nothing arrives, as if a cable was pulled."""
        self.held = True


class Proxy:
    """Forwards to `address`; a context manager.

    Args:
        address: `tcp://127.0.0.1:PORT`.
        pace: bytes a second, of each connection to the client; None: all at once.
        cut_after: bytes to the client after which a connection ends; None: never.

    Attributes:
        address: where it listens.
        stretches: every connection so far, in order.
    """

    def __init__(self, address: str, *, pace: float | None = None, cut_after: int | None = None) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to = host, int(port)
        self._pace = pace
        self._cut_after = cut_after
        self.stretches: list[Stretch] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(10)
        assert not self._thread.is_alive()
        os.close(self._stop)

    def cut(self, stretch: Stretch) -> None:
        """End it on both sides."""
        stretch.cut.set()
        for sock in (stretch.client, stretch.server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def alive(self) -> list[Stretch]:
        """Those that carry something, the short first look of a client left out."""
        return [stretch for stretch in self.stretches if not stretch.cut.is_set()]

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        selector.register(self._stop, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(0.05):
                if key.fileobj is self._listener:
                    client = self._listener.accept()[0]
                    server = socket.create_connection(self._to)
                    stretch = Stretch(client, server)
                    self.stretches.append(stretch)
                    selector.register(client, selectors.EVENT_READ, (stretch, server))
                    selector.register(server, selectors.EVENT_READ, (stretch, client))
                elif key.data is None:
                    for stretch in self.stretches:
                        stretch.client.close()
                        stretch.server.close()
                    self._listener.close()
                    selector.close()
                    return
                else:
                    stretch, to = key.data
                    if not stretch.held and not self._forward(stretch, key.fileobj, to):  # type: ignore[arg-type]
                        self.cut(stretch)
                        selector.unregister(stretch.client)
                        selector.unregister(stretch.server)
                    elif stretch.held:
                        time.sleep(0.001)

    def _forward(self, stretch: Stretch, sock: socket.socket, to: socket.socket) -> bool:
        if sock.fileno() < 0 or stretch.cut.is_set():
            return True
        try:
            data = sock.recv(1 << 16)
            to.sendall(data)
        except OSError:
            return False
        if to is stretch.client:
            stretch.brought += len(data)
            if self._pace is not None:
                time.sleep(len(data) / self._pace)
            if self._cut_after is not None and stretch.brought > self._cut_after:
                return False
        return bool(data)
