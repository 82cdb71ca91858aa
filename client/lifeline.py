"""The Unix connection on which a session on the same host begins, and whose end is its end."""

from __future__ import annotations

import os
import select
import socket

from headrace.channel import Channel, Closed
from headrace.connect import connect
from headrace.errors import ConnectionLost
from headrace.protocol import Goodbye, Hello, Welcome, decode_session_reply, encode
from headrace.session import LONGEST_POLL, Interrupted, Opening


class Lifeline:
    """Make it with `open`.

    Attributes:
        welcome: what the daemon said.
        fds: the descriptors that came with it, until they are taken.
    """

    def __init__(self, channel: Channel, welcome: Welcome, fds: list[int]) -> None:
        self._channel = channel
        self.welcome = welcome
        self.fds = fds

    @classmethod
    def open(
        cls, address: str, stream: str | None, transport: str, *, timeout: float, stop: int, device: str = ""
    ) -> Lifeline:
        """Connect, say `Hello` and wait for `Welcome`.

        Args:
            address: `ipc://PATH`.
            transport: how chunks are to come, `shm` or `tcp`.
            device: as `open_session`.

        Raises:
            as `open_session`.
        """
        channel = connect(address, timeout=timeout, stop=stop)
        try:
            client = f"pid {os.getpid()}"
            channel.post(encode(Hello(stream=stream, transport=transport, client=client, device=device)))
            return cls(channel, *_handshake(channel, Opening(address, timeout), stop))
        except Closed:
            _hang_up(channel)
            raise ConnectionLost(f"the daemon at {address} closed the connection before it was ready") from None
        except BaseException:
            _hang_up(channel)
            raise

    def fileno(self) -> int:
        return self._channel.fileno()

    def over(self) -> str | None:
        """Why the session is over, if what has arrived says so.

        Raises:
            ProtocolError: something that this version cannot take.
        """
        try:
            for data, fds in self._channel.receive():
                _close_all(fds)
                message = decode_session_reply(data)
                if isinstance(message, Goodbye):
                    return f"the daemon ended the session: {message.reason}"
        except Closed:
            return "the daemon ended"
        return None

    def hang_up(self) -> None:
        """End the session, although a child that was forked meanwhile may have a copy. May be called twice."""
        _close_all(self.fds)
        self.fds = []
        _hang_up(self._channel)

    def abandon(self) -> None:
        """For a forked child: drop its copy of the connection, so that the end is the parent's end."""
        self._channel.sock.close()


def _hang_up(channel: Channel) -> None:
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
        wait_readable(channel, stop, opening.left())


def wait_readable(channel: Channel, stop: int, seconds: float) -> None:
    """
    Raises:
        Interrupted: `stop` is readable.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(stop, select.POLLIN)
    if any(fd == stop for fd, _ in poll.poll(1000 * min(seconds, LONGEST_POLL))):
        raise Interrupted


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
