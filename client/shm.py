"""A session on the same host: one Unix connection, one mapped ring, one DEALER socket.

The rows of a chunk are read where the worker wrote them. A slot's generation, read before and after, tells whether
it still held this chunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace import protocol
from headrace.connect import LONGEST_PATH, socket_path
from headrace.errors import ConnectionLost, ProtocolError
from headrace.lifeline import Lifeline
from headrace.pace import Pace
from headrace.protocol import Cancel, Chunk, Failed, Get, Release, decode_daemon, encode
from headrace.session import TURN, Delivery, Events, Ready, cut, report, wait_for
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

    connected = True

    def __init__(self, address: str, lifeline: Lifeline, ring: Ring, dealer: zmq.Socket[bytes]) -> None:
        self.address = address
        self.welcome = lifeline.welcome
        self.ring = ring
        self._lifeline = lifeline
        self._dealer = dealer

    @classmethod
    def open(
        cls,
        address: str,
        stream: str | None,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        timeout: float,
        stop: int,
        device: str = "",
    ) -> SharedSession:
        """As `open_session`, at an address `ipc://PATH`."""
        lifeline = Lifeline.open(address, stream, "shm", timeout=timeout, stop=stop, device=device)
        try:
            ring = _attach(address, lifeline)
            try:
                dealer = _connect(address, _endpoint(address, lifeline.welcome.endpoint), context)
            except BaseException:
                ring.close()
                raise
        except BaseException:
            lifeline.hang_up()
            raise
        return cls(address, lifeline, ring, dealer)

    def get(self, request: int, epoch: int, chunk: int, first: int, count: int) -> None:
        self._send(Get(token=self.welcome.token, request=request, epoch=epoch, chunk=chunk, first=first, count=count))

    def release(self, request: int) -> None:
        """Give a delivered chunk's slot back."""
        self._send(Release(token=self.welcome.token, request=request))

    def cancel(self, request: int) -> None:
        self._send(Cancel(token=self.welcome.token, request=request))

    def report(self, pace: Pace) -> None:
        self._send(report(self.welcome.token, pace))

    def describe(self) -> str:
        return f"the daemon at {self.address} (pid {self.welcome.pid})"

    def wait(self, wake: int) -> Events:
        return wait_for(self, wake)

    def watched(self) -> Iterable[zmq.Socket[Any] | int]:
        return self._dealer, self._lifeline.fileno()

    def take(self, ready: Ready) -> Events:
        answers: list[Delivery | Failed] = []
        lost, taken = None, 0
        # Asking for the state keeps the interpreter lock, a receive gives it up, and getting it back may take long.
        while cast(int, self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN and taken < TURN:
            taken += 1
            message = decode_daemon(self._dealer.recv(zmq.NOBLOCK))
            if isinstance(message, Chunk):
                answers.append(self._delivery(message))
            elif isinstance(message, Failed):
                answers.append(message)
            elif message.token == self.welcome.token:
                lost = "the daemon does not know this session"
        if self._lifeline.fileno() in ready:
            lost = self._lifeline.over() or lost
        return Events(answers, lost)

    def close(self) -> None:
        self._dealer.close()
        self._lifeline.hang_up()
        self.ring.close()

    def abandon(self) -> None:
        self._lifeline.abandon()

    def _delivery(self, message: Chunk) -> SharedDelivery:
        if message.slot >= self.ring.slots:
            raise ProtocolError(f"a chunk in slot {message.slot} of {self.ring.slots}")
        return SharedDelivery(self.ring, message)

    def _send(self, message: protocol.Message) -> None:
        self._dealer.send(encode(message), zmq.NOBLOCK)


def _attach(address: str, lifeline: Lifeline) -> Ring:
    welcome, fds = lifeline.welcome, lifeline.fds
    if welcome.transport != "shm" or len(fds) != 1:
        raise ProtocolError(f"the daemon at {address} offers transport {welcome.transport} with {len(fds)} rings")
    try:
        return Ring.attach(fds.pop(), welcome.layout, welcome.slots)
    except (ValueError, OSError) as error:
        raise ProtocolError(f"the ring of the daemon at {address} cannot be mapped: {error}") from error


def _endpoint(address: str, named: str) -> str:
    """Where the daemon's ZeroMQ listens, as seen from here.

    Raises:
        ConnectionLost: its socket is not here.
        ProtocolError: it is nowhere that a daemon of this host may send its clients to.
    """
    if not named.startswith("ipc://"):
        raise ProtocolError(f"the daemon at {address} names the endpoint {named}, which is no ipc://PATH")
    # The daemon names it by a path of its own. In another container the same folder may lie elsewhere, and there it is
    # beside the socket that we came by; who came by a link finds it where the daemon says.
    beside = f"{socket_path(address)}.zmq"
    for path in (beside, named.removeprefix("ipc://")):
        if os.path.exists(path) and len(os.fsencode(path)) <= LONGEST_PATH:
            return f"ipc://{path}"
    # ZeroMQ would try again and again, and say nothing.
    raise ConnectionLost(
        f"the daemon at {address} has its other socket at {named}, which is not here, nor is there a {beside}: a "
        "container must be given the folder of both, not one socket"
    )


def _connect(address: str, endpoint: str, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.linger = 0
        # The number of outstanding requests is the bound; a full queue would block or lose a message.
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.maxmsgsize = protocol.DAEMON_LIMIT
        dealer.connect(endpoint)
    except BaseException as error:
        dealer.close()
        if isinstance(error, zmq.ZMQError):
            raise ProtocolError(f"the daemon at {address} names the endpoint {endpoint}: {error}") from None
        raise
    return dealer
