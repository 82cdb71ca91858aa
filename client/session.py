"""The client's end of a session: one Unix connection, one mapped ring, one DEALER socket."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import zmq

from headrace import protocol
from headrace.channel import Channel, Closed
from headrace.connect import connect
from headrace.errors import ConnectionLost, DeadlineError, HeadraceError, ProtocolError, from_wire
from headrace.protocol import (
    Cancel,
    Chunk,
    Failed,
    Get,
    Goodbye,
    Hello,
    Indexing,
    Release,
    Unknown,
    Welcome,
    decode_daemon,
    decode_session_reply,
    encode,
)
from headrace.slots import Ring

log = logging.getLogger(__name__)

#: Seconds of the longest single wait in a poll, which counts milliseconds in 32 bits.
LONGEST_POLL = 3600.0

_LOG_EVERY = 5.0


class Interrupted(Exception):
    """The Loader was closed during a wait."""


class Refusal(Exception):
    """The daemon answered, and the answer is no. Trying again would give the same.

    Args:
        error: what the caller is to be told.
    """

    def __init__(self, error: HeadraceError) -> None:
        super().__init__(str(error))
        self.error = error


class Events(NamedTuple):
    """What `Session.wait` saw: messages, and why the session is over if it is."""

    messages: Sequence[Chunk | Failed | Unknown]
    lost: str | None


class Session:
    """Make it with `open`.

    Attributes:
        welcome: what the daemon said.
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
    ) -> Session:
        """Connect, say `Hello` and wait for `Welcome`, however long the listing takes while it makes progress.

        Args:
            timeout: seconds without progress.
            stop: a descriptor; when it becomes readable, `Interrupted` is raised.

        Raises:
            Refusal: the daemon says no.
            ConfigError: not an address.
            ConnectionLost: nobody listens there, or the connection ended.
            DeadlineError: no progress.
            ProtocolError: an answer that this version cannot take.
        """
        channel = connect(address, timeout=timeout)
        try:
            hello = Hello(stream=stream, client=f"pid {os.getpid()}")
            channel.post(encode(hello))
            welcome, fds = _handshake(address, channel, timeout, stop)
            ring = _attach(address, welcome, fds)
        except Closed:
            _hang_up(channel)
            raise ConnectionLost(f"the daemon at {address} closed the connection before it was ready") from None
        except BaseException:
            _hang_up(channel)
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
            _hang_up(channel)
            if isinstance(error, zmq.ZMQError):
                raise ProtocolError(f"the daemon at {address} names the endpoint {welcome.endpoint}: {error}") from None
            raise
        return cls(address, channel, welcome, ring, dealer)

    def get(self, request: int, epoch: int, chunk: int) -> None:
        """Ask for a chunk."""
        self._send(Get(token=self.welcome.token, request=request, epoch=epoch, chunk=chunk))

    def release(self, request: int) -> None:
        """Give a delivered chunk's slot back."""
        self._send(Release(token=self.welcome.token, request=request))

    def cancel(self, request: int) -> None:
        """Take back every request up to this one."""
        self._send(Cancel(token=self.welcome.token, request=request))

    def wait(self, wake: int) -> Events:
        """Everything that has arrived; waits until something has, or `wake` is readable.

        Raises:
            ProtocolError: a message that this version cannot take.
        """
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        ready = dict(poller.poll())
        messages = []
        # Asking for the state keeps the interpreter lock, a receive gives it up, and getting it back may take long.
        while cast(int, self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages.append(decode_daemon(self._dealer.recv(zmq.NOBLOCK)))
        lost = self._listen() if self._channel.fileno() in ready else None
        return Events(messages, lost)

    def close(self) -> None:
        """Leave; the daemon takes back what this session still held. May be called twice."""
        self._dealer.close()
        _hang_up(self._channel)
        self.ring.close()

    def abandon(self) -> None:
        """For a forked child: drop the copy of the connection, so that its end is the parent's end."""
        self._channel.sock.close()

    def _send(self, message: protocol.Message) -> None:
        self._dealer.send(encode(message), zmq.NOBLOCK)

    def _listen(self) -> str | None:
        try:
            for data, fds in self._channel.receive():
                for fd in fds:
                    os.close(fd)
                message = decode_session_reply(data)
                if isinstance(message, Goodbye):
                    return f"the daemon stopped: {message.reason}"
        except Closed:
            return "the daemon ended"
        return None


def _hang_up(channel: Channel) -> None:
    """End the connection, although a child that was forked meanwhile may have a copy of it."""
    try:
        channel.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended
    channel.close()


def _handshake(address: str, channel: Channel, timeout: float, stop: int) -> tuple[Welcome, list[int]]:
    moved = logged = time.monotonic()
    done = ("", 0)
    while True:
        for data, fds in channel.receive():
            message = decode_session_reply(data)
            if isinstance(message, Welcome):
                return message, fds
            for fd in fds:
                os.close(fd)
            if isinstance(message, protocol.Refused):
                raise Refusal(from_wire(message.kind, message.text))
            if isinstance(message, Goodbye):
                raise ConnectionLost(f"the daemon at {address} is stopping: {message.reason}")
            if isinstance(message, Indexing) and (message.unit, message.done) != done:
                done, moved = (message.unit, message.done), time.monotonic()
                if moved - logged >= _LOG_EVERY:
                    logged = moved
                    log.warning("stream %s is being opened: %s", message.stream, _progress(message))
        left = moved + timeout - time.monotonic()
        if left <= 0:
            doing = "goes on no more with opening the stream" if done[0] else "does not answer"
            raise DeadlineError(f"the daemon at {address} {doing}: no progress for {timeout:g} s")
        _wait_readable(channel, stop, left)


def _wait_readable(channel: Channel, stop: int, seconds: float) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(stop, select.POLLIN)
    if any(fd == stop for fd, _ in poll.poll(1000 * min(seconds, LONGEST_POLL))):
        raise Interrupted


def _progress(message: Indexing) -> str:
    if not message.total:
        return f"{message.done:,} {message.unit} so far"
    return f"{message.done:,} of {message.total:,} {message.unit} ({100 * message.done // message.total} %)"


def _attach(address: str, welcome: Welcome, fds: list[int]) -> Ring:
    if welcome.transport != "shm" or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(f"the daemon at {address} offers transport {welcome.transport} with {len(fds)} rings")
    try:
        return Ring.attach(fds[0], welcome.layout, welcome.slots)
    except (ValueError, OSError) as error:
        raise ProtocolError(f"the ring of the daemon at {address} cannot be mapped: {error}") from error
