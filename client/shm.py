"""A session on the same host: one Unix connection, one mapped ring, one DEALER socket.

The rows of a chunk are read where the worker wrote them. A slot's generation, read before and after, tells whether
it still held this chunk.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace import protocol
from headrace.channel import Channel, Closed
from headrace.connect import connect
from headrace.errors import ConnectionLost, ProtocolError
from headrace.protocol import (
    Cancel,
    Chunk,
    Failed,
    Get,
    Goodbye,
    Hello,
    Release,
    Welcome,
    decode_daemon,
    decode_session_reply,
    encode,
)
from headrace.session import LONGEST_POLL, Delivery, Events, Interrupted, Opening
from headrace.slots import Ring


class SharedDelivery:
    """A chunk in a slot of the ring.

    Args:
        ring: mapped.
        message: names the slot, which exists.
    """

    first = 0

    def __init__(self, ring: Ring, message: Chunk) -> None:
        self.message = message
        self._generation = ring.generation
        self._view = view = ring.views[message.slot]
        self.labels: NDArray[Any] = view.labels
        self.indices: NDArray[np.int64] = view.indices
        self.status: NDArray[np.uint8] = view.status

    def images(self, first: int, size: int) -> Iterable[NDArray[np.uint8]]:
        return (self._view.images[first : first + size],)

    def texts(self, first: int, size: int) -> list[bytes]:
        return cut(self._view.ends, self._view.text, first, size)

    def sound(self) -> bool:
        return bool(self._generation[self.message.slot] == self.message.generation)


class SharedSession:
    """Make it with `open`.

    Attributes:
        ring: the stream's slots, read-only.
    """

    def __init__(self, address: str, channel: Channel, welcome: Welcome, ring: Ring, dealer: zmq.Socket[bytes]) -> None:
        self.address = address
        self.welcome = welcome
        self.ring = ring
        self._channel = channel
        self._dealer = dealer

    @classmethod
    def open(
        cls, address: str, stream: str | None, context: zmq.Context[zmq.Socket[bytes]], *, timeout: float, stop: int
    ) -> SharedSession:
        """As `open_session`, at an address `ipc://PATH`."""
        channel, welcome, fds = say_hello(address, stream, "shm", timeout=timeout, stop=stop)
        try:
            ring = _attach(address, welcome, fds)
        except BaseException:
            hang_up(channel)
            raise
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.linger = 0
            # The number of outstanding requests is the bound; a full queue would block or lose a message.
            dealer.sndhwm = dealer.rcvhwm = 0
            dealer.maxmsgsize = protocol.DAEMON_LIMIT
            dealer.connect(welcome.endpoint)
        except BaseException as error:
            dealer.close()
            ring.close()
            hang_up(channel)
            if isinstance(error, zmq.ZMQError):
                raise ProtocolError(f"the daemon at {address} names the endpoint {welcome.endpoint}: {error}") from None
            raise
        return cls(address, channel, welcome, ring, dealer)

    def get(self, request: int, epoch: int, chunk: int, first: int, count: int) -> None:
        self._send(Get(token=self.welcome.token, request=request, epoch=epoch, chunk=chunk, first=first, count=count))

    def release(self, request: int) -> None:
        """Give a delivered chunk's slot back."""
        self._send(Release(token=self.welcome.token, request=request))

    def cancel(self, request: int) -> None:
        self._send(Cancel(token=self.welcome.token, request=request))

    def wait(self, wake: int) -> Events:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        ready = dict(poller.poll())
        answers: list[Delivery | Failed] = []
        lost = None
        # Asking for the state keeps the interpreter lock, a receive gives it up, and getting it back may take long.
        while cast(int, self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = decode_daemon(self._dealer.recv(zmq.NOBLOCK))
            if isinstance(message, Chunk):
                answers.append(self._delivery(message))
            elif isinstance(message, Failed):
                answers.append(message)
            elif message.token == self.welcome.token:
                lost = "the daemon does not know this session"
        if self._channel.fileno() in ready:
            lost = farewell(self._channel) or lost
        return Events(answers, lost)

    def close(self) -> None:
        self._dealer.close()
        hang_up(self._channel)
        self.ring.close()

    def abandon(self) -> None:
        """Drop the child's copy of the connection, so that its end is the parent's end."""
        self._channel.sock.close()

    def _delivery(self, message: Chunk) -> SharedDelivery:
        if message.slot >= self.ring.slots:
            raise ProtocolError(f"a chunk in slot {message.slot} of {self.ring.slots}")
        return SharedDelivery(self.ring, message)

    def _send(self, message: protocol.Message) -> None:
        self._dealer.send(encode(message), zmq.NOBLOCK)


def cut(ends: NDArray[np.int64], text: NDArray[np.uint8], first: int, size: int) -> list[bytes]:
    """The texts of `size` rows from row `first` on, as bytes of their own.

    Args:
        ends: where the text of each row ends in `text`; it begins at the end of the row before.

    Raises:
        ProtocolError: the ends fall, or lie beyond the text.
    """
    edges = [0 if first == 0 else int(ends[first - 1]), *ends[first : first + size].tolist()]
    if edges != sorted(edges) or edges[0] < 0 or edges[-1] > text.size:
        raise ProtocolError("texts that end before they begin, or beyond their field")
    start = edges[0]
    whole = text[start : edges[-1]].tobytes()
    return [whole[a - start : b - start] for a, b in zip(edges, edges[1:], strict=False)]


def say_hello(
    address: str, stream: str | None, transport: str, *, timeout: float, stop: int
) -> tuple[Channel, Welcome, list[int]]:
    """A session that begins on the daemon's Unix socket: the connection, `Welcome`, and what came with it.

    Raises:
        as `open_session`.
    """
    channel = connect(address, timeout=timeout)
    try:
        hello = Hello(stream=stream, transport=transport, client=f"pid {os.getpid()}")
        channel.post(encode(hello))
        return channel, *_handshake(channel, Opening(address, timeout), stop)
    except Closed:
        hang_up(channel)
        raise ConnectionLost(f"the daemon at {address} closed the connection before it was ready") from None
    except BaseException:
        hang_up(channel)
        raise


def farewell(channel: Channel) -> str | None:
    """Why the session is over, if what has arrived on its Unix connection says so."""
    try:
        for data, fds in channel.receive():
            for fd in fds:
                os.close(fd)
            message = decode_session_reply(data)
            if isinstance(message, Goodbye):
                return f"the daemon stopped: {message.reason}"
    except Closed:
        return "the daemon ended"
    return None


def hang_up(channel: Channel) -> None:
    """End the connection, although a child that was forked meanwhile may have a copy of it."""
    try:
        channel.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended
    channel.close()


def _handshake(channel: Channel, opening: Opening, stop: int) -> tuple[Welcome, list[int]]:
    while True:
        for data, fds in channel.receive():
            try:
                welcome = opening.heard(decode_session_reply(data))
            except BaseException:
                _close_all(fds)
                raise
            if welcome is not None:
                return welcome, fds
            _close_all(fds)
        _wait_readable(channel, stop, opening.left())


def _wait_readable(channel: Channel, stop: int, seconds: float) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(stop, select.POLLIN)
    if any(fd == stop for fd, _ in poll.poll(1000 * min(seconds, LONGEST_POLL))):
        raise Interrupted


def _attach(address: str, welcome: Welcome, fds: list[int]) -> Ring:
    if welcome.transport != "shm" or len(fds) != 1:
        _close_all(fds)
        raise ProtocolError(f"the daemon at {address} offers transport {welcome.transport} with {len(fds)} rings")
    try:
        return Ring.attach(fds[0], welcome.layout, welcome.slots)
    except (ValueError, OSError) as error:
        raise ProtocolError(f"the ring of the daemon at {address} cannot be mapped: {error}") from error


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
