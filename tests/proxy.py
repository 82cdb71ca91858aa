"""A stretch of network for tests: forwards connections to a port; cuts, resets, stops, delays or slows them on cue."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

#: Bytes of one read, and those under way in one direction of a connection after which no more are read.
_READ, _UNDER_WAY = 1 << 16, 1 << 18
#: Seconds of traffic that one read of a slow connection takes at most.
_SLOWLY = 0.05
#: What makes the kernel end a connection with RST.
_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Way:
    """One direction of a connection: what was read from `source` and is to be written to `sink` from a time on."""

    source: socket.socket
    sink: socket.socket
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    free: float = 0.0
    brought: int = 0
    over: bool = False

    @property
    def under_way(self) -> int:
        return sum(len(data) for _, data in self.queue)


@dataclass(eq=False)
class Stretch:
    """One connection. `held`: nothing arrives; `ended`: for the proxy, it is no more."""

    client: socket.socket
    server: socket.socket
    held: bool = False
    ended: bool = False
    ways: tuple[_Way, _Way] = field(init=False)

    def __post_init__(self) -> None:
        self.ways = _Way(self.client, self.server), _Way(self.server, self.client)

    def hold(self) -> None:
        """From now on nothing arrives, as if a cable was pulled."""
        self.held = True


class Proxy:
    """Forwards to `address`; a context manager.

    Args:
        address: `tcp://127.0.0.1:PORT`; nobody need listen there yet.
        pace: bytes a second, of each connection in each direction; None: all at once.
        cut_after: bytes to the client after which a connection ends; None: never.

    Attributes:
        address: where it listens.
        pace: may be changed at any time.
        delay: seconds that everything is late; likewise.
        refusing: whether new connections are reset, as where nobody listens; likewise.
        mute: whether new connections are taken and nothing is said on them, as by a machine that hangs; likewise.
    """

    def __init__(self, address: str, *, pace: float | None = None, cut_after: int | None = None) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to = host, int(port)
        self.pace = pace
        self.delay = 0.0
        self.refusing = self.mute = False
        self._cut_after = cut_after
        self._lock = threading.Lock()
        self._stretches: list[Stretch] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        os.eventfd_write(self._bell, 1)
        self._thread.join(10)
        assert not self._thread.is_alive()
        os.close(self._bell)

    @property
    def closed(self) -> bool:
        """Whether it was left."""
        return self._stopped

    @property
    def alive(self) -> list[Stretch]:
        """Connections that have not ended, in the order in which they came."""
        with self._lock:
            return [stretch for stretch in self._stretches if not stretch.ended]

    def cut(self, stretch: Stretch, *, reset: bool = False) -> None:
        """End it on both sides: properly, or with RST."""
        with self._lock:  # or the descriptors are other connections' by now
            if not stretch.ended:
                stretch.ended = True
                _shut(stretch.client, reset=reset)
                _shut(stretch.server, reset=reset)
        os.eventfd_write(self._bell, 1)

    def halve(self, stretch: Stretch, *, client: bool = False) -> None:
        """End it towards the server alone, or the client: to the other it looks as if it was there, and is silent."""
        stretch.held = True
        with self._lock:
            if not stretch.ended:
                _shut(stretch.client if client else stretch.server)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            self._forget_the_ended()
            poll, wait = select.poll(), 0.05
            poll.register(self._listener, select.POLLIN)
            poll.register(self._bell, select.POLLIN)
            wanted: dict[int, list[tuple[Stretch, _Way, int]]] = {}
            now = time.monotonic()
            for stretch in self._stretches:
                for way in stretch.ways:
                    if stretch.held:
                        if not way.over:
                            wanted.setdefault(way.source.fileno(), []).append((stretch, way, select.POLLRDHUP))
                        continue
                    if not way.over and way.under_way < _UNDER_WAY:
                        wanted.setdefault(way.source.fileno(), []).append((stretch, way, select.POLLIN))
                    if way.queue and way.queue[0][0] <= now:
                        wanted.setdefault(way.sink.fileno(), []).append((stretch, way, select.POLLOUT))
                    elif way.queue:
                        wait = min(wait, way.queue[0][0] - now)
            for fd, reasons in wanted.items():
                poll.register(fd, sum({event for _, _, event in reasons}))
            ready = dict(poll.poll(1000 * wait))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            for fd, reasons in wanted.items():
                for stretch, way, event in reasons:
                    if ready.get(fd, 0) & (event | select.POLLERR | select.POLLHUP) and not stretch.ended:
                        self._move(stretch, way, event)
            if self._listener.fileno() in ready:
                self._accept()
        for stretch in self.alive:
            self.cut(stretch)
        self._forget_the_ended()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client = self._listener.accept()[0]
            if self.refusing:
                _shut(client, reset=True)
                client.close()
                return
            server = socket.socket()
            for side in (client, server):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self.mute:
                server.connect_ex(self._to)  # that nobody listens there is found when it is read from
            with self._lock:
                self._stretches.append(Stretch(client, server, held=self.mute))

    def _move(self, stretch: Stretch, way: _Way, event: int) -> None:
        try:
            if event == select.POLLIN:
                self._read(way)
            elif event == select.POLLOUT:
                self._write(stretch, way)
            else:  # nothing is said to the other side
                way.over = True
        except BlockingIOError:
            return
        except OSError:
            self.cut(stretch, reset=True)
        if all(each.over for each in stretch.ways) if stretch.held else way.over and not way.queue:
            self.cut(stretch)

    def _read(self, way: _Way) -> None:
        size = _READ if self.pace is None else max(1, min(_READ, int(self.pace * _SLOWLY)))
        data = way.source.recv(size)
        if not data:
            way.over = True
            return
        due = time.monotonic() + self.delay
        if self.pace is not None:
            due = way.free = max(due, way.free) + len(data) / self.pace
        way.queue.append((due, data))

    def _write(self, stretch: Stretch, way: _Way) -> None:
        due, data = way.queue[0]
        sent = way.sink.send(data)
        way.brought += sent
        if sent == len(data):
            way.queue.popleft()
        else:
            way.queue[0] = due, data[sent:]
        if self._cut_after is not None and way.sink is stretch.client and way.brought > self._cut_after:
            self.cut(stretch)

    def _forget_the_ended(self) -> None:
        with self._lock:
            for stretch in self._stretches:
                if stretch.ended:
                    stretch.client.close()
                    stretch.server.close()
            self._stretches = [stretch for stretch in self._stretches if not stretch.ended]


def _shut(side: socket.socket, *, reset: bool = False) -> None:
    """End our half; with `reset` the kernel says so by RST once it is closed."""
    with contextlib.suppress(OSError):
        if reset:
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        else:
            side.shutdown(socket.SHUT_RDWR)
