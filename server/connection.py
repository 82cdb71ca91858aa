"""A client's Unix connection at the daemon, and the session that it carries once there was a Hello."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field

from headrace import protocol
from headrace.channel import Channel
from headrace.server.desk import Session
from headrace.server.listener import Listener


@dataclass(eq=False, slots=True)
class Connection:
    """
    Attributes:
        listener: where it came in.
        pidfd: of the client; -1 where its PID means nothing here.
        name: for the log.
        stream: that it said Hello for.
        token: of the session; empty before there is one.
        identity: at the ROUTER; known from the session's first message on.
        expelled: no message of it is taken any more. Its leases stay until its end proves that nobody reads.
    """

    channel: Channel
    listener: Listener
    pidfd: int
    name: str
    since: float = field(default_factory=time.monotonic)
    stream: str | None = None
    session: Session | None = None
    token: bytes = b""
    identity: bytes = b""
    expelled: bool = False

    @classmethod
    def accepted(cls, sock: socket.socket, pid: int, uid: int, listener: Listener) -> Connection:
        """Of a socket that was just accepted; owned from now on."""
        channel = Channel(sock, limit=protocol.CLIENT_LIMIT)
        return cls(channel, listener, _pidfd(pid), f"client {pid} (uid {uid})")

    def close(self) -> None:
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _pidfd(pid: int) -> int:
    # 0 is a process of another PID namespace: then the connection's end must do. So it must for one that has ended
    # already; should its number be another's by now, that one's end only ends a connection that is over.
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1
