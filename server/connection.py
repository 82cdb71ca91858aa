"""A client at the daemon: where it says Hello, and the session that it carries then."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import msgspec

from headrace import protocol, stages
from headrace.channel import Channel, Closed
from headrace.pipeline.index import shown
from headrace.protocol import Hello, Message, Report
from headrace.server.desk import Session
from headrace.server.network import Network
from headrace.server.transport import Transport
from headrace.workers.loop import Loop

#: Bytes that a client may leave unread on its Unix connection, and bytes of it that are taken in one turn of the loop:
#: more than any message that is right, and few enough Pings not to keep the others waiting.
_UNREAD = 1 << 20
_TURN = 1 << 13

_SO_PEERPIDFD = 77  # of Linux 6.5 and newer; Python has no name for it


class Gone(Exception):
    """The client has ended, or does not read what it is told."""


class Connection(ABC):
    """
    Args:
        name: for the log.
        offers: the transports that a session begun here may have, by name.

    Attributes:
        since: when it came.
        stream: that it said Hello for.
        transport: that it asked for.
        device: of the GPU that its batches go to, or "".
        report: what it said of itself last.
        session, token: None and empty before there is one.
        expelled: no message of it is taken any more. Its leases stay until its end proves that nobody reads.
        members: its session's connections over tcp.
    """

    #: Whether the client is on this host.
    here = True
    #: Descriptors that it takes, beside those of connections over tcp, which are counted there.
    descriptors = 0

    def __init__(self, name: str, offers: Mapping[str, Callable[[], Transport]]) -> None:
        self.name = name
        self.offers = offers
        self.since = time.monotonic()
        self.stream: str | None = None
        self.transport: Transport | None = None
        self.device = ""
        self.report: Report | None = None
        self.session: Session | None = None
        self.token = b""
        self.expelled = False
        self.members: set[tuple[Network, bytes]] = set()

    def introduce(self, hello: Hello, stream: str) -> None:
        """It has said who it is, for this stream. Its name goes into logs, where it must not be a line of its own."""
        self.stream, self.device = stream, hello.device
        if hello.client:
            self.name += f" {shown(hello.client.encode())}"

    def reported(self, report: Report) -> None:
        """It says how it is served. Stages that no client has are left out: they would be series without end."""
        known = {name: report.stages[name] for name in stages.CLIENT if name in report.stages}
        self.report = msgspec.structs.replace(report, stages=known)

    @abstractmethod
    def say(self, message: Message, *fds: int) -> None:
        """Tell the client something, with descriptors that remain the caller's.

        Raises:
            Gone: it is not there any more, or does not read.
        """

    @property
    def behind(self) -> bool:
        """Whether it has not read yet what it was told."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Nothing is heard of it any more."""


class UnixConnection(Connection):
    """A connection to the Unix socket. Its end is the end of the session.

    Args:
        sock: that was just accepted; owned from now on.
        pid, uid: of the process at the other end; pid 0 is one of another PID namespace.
        loop: calls `heard` back when there is something to receive, and `ended` when the process has ended.
    """

    descriptors = 3  # its own, its process's, ZeroMQ's

    def __init__(
        self,
        sock: socket.socket,
        pid: int,
        uid: int,
        offers: Mapping[str, Callable[[], Transport]],
        loop: Loop,
        heard: Callable[[UnixConnection], None],
        ended: Callable[[UnixConnection], None],
    ) -> None:
        super().__init__(f"client {pid or 'of another PID namespace'} (uid {uid})", offers)
        self._channel = Channel(sock, limit=protocol.CLIENT_LIMIT, turn=_TURN)
        self._loop = loop
        self._heard = heard
        self._pidfd = _pidfd(sock, pid)
        self._watch()
        if self._pidfd >= 0:
            loop.watch(self._pidfd, lambda: ended(self))

    def receive(self) -> list[bytes]:
        """What has arrived.

        Raises:
            Gone: nothing, and nothing will.
            ProtocolError: a frame that is too large.
        """
        try:
            self._channel.flush()
            self._watch()
            return [frame for frame, _ in self._channel.receive()]
        except Closed:
            raise Gone("the connection has ended") from None

    def say(self, message: Message, *fds: int) -> None:
        if self._channel.queued_bytes > _UNREAD:
            raise Gone("it does not read what it is told")
        try:
            self._channel.post(protocol.encode(message), fds)
        except Closed:
            raise Gone("the connection has ended") from None
        except OSError as error:
            raise Gone(str(error)) from None
        self._watch()

    @property
    def behind(self) -> bool:
        return self._channel.pending

    def close(self) -> None:
        self._loop.unwatch(self._channel)
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._channel.close()

    def _watch(self) -> None:
        self._loop.watch(self._channel, lambda: self._heard(self), write=self._channel.pending)


class RemoteConnection(Connection):
    """A control connection over tcp whose client said Hello on it. Its end is found out by asking.

    Args:
        network: over which it came.
        identity: of the connection there.
        peer: its address, and what its key is called.
    """

    here = False

    def __init__(
        self, network: Network, identity: bytes, peer: str, offers: Mapping[str, Callable[[], Transport]]
    ) -> None:
        super().__init__(f"client at {peer}", offers)
        self._network = network
        self._identity = identity
        self.members.add((network, identity))

    def say(self, message: Message, *fds: int) -> None:
        if not self._network.send(self._identity, message):
            raise Gone("it is gone, or does not read what it is told")

    def close(self) -> None:
        pass  # its peer ends it


def _pidfd(sock: socket.socket, pid: int) -> int:
    """Of the process at the other end; -1 where the connection's end must do."""
    # The socket knows the process itself: also in another PID namespace, where no number says which it is.
    with contextlib.suppress(OSError):  # a kernel that is older
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    # The number of one that has ended already may be another's by now, whose end then ends a connection that is over.
    with contextlib.suppress(OSError):
        if pid > 0:
            return os.pidfd_open(pid)
    return -1
