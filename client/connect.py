"""A connection to a daemon's address."""

from __future__ import annotations

import errno
import os
import socket
import time

from headrace.channel import Channel
from headrace.errors import ConfigError, ConnectionLost
from headrace.protocol import DAEMON_LIMIT

#: Bytes of the longest path of a Unix socket, without the closing zero.
LONGEST_PATH = 107

_HINTS = {
    errno.ENOENT: "no daemon was started there: start it first, `headrace serve CONFIG`",
    errno.ECONNREFUSED: "the daemon that was there is gone: start it again, `headrace serve CONFIG`",
    errno.EACCES: "its `socket.group` says who besides its user may connect",
}


def socket_path(address: str) -> str:
    """The path in `ipc://PATH`.

    Raises:
        ConfigError: another kind of address, or a path too long for a Unix socket.
    """
    scheme, _, path = address.partition("://")
    if scheme == "tcp":
        raise ConfigError(f"{address}: tcp is not available yet; use the daemon's ipc://PATH on the same host")
    if scheme != "ipc" or not path:
        raise ConfigError(f"{address!r} is no address of this version: it must be ipc://PATH")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(
            f"{address}: the path has {len(os.fsencode(path))} bytes, a Unix socket at most {LONGEST_PATH}"
        )
    return path


def connect(address: str, *, timeout: float) -> Channel:
    """A connection to the daemon's Unix socket.

    Raises:
        ConfigError: not an `ipc://` address.
        ConnectionLost: nobody listens there, or this user may not connect.
    """
    path = socket_path(address)
    deadline = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path)
            return Channel(sock, limit=DAEMON_LIMIT, descriptors=1)
        except OSError as error:
            sock.close()
            # The queue of connections is full: a Unix socket says so instead of letting us wait for our turn.
            if error.errno == errno.EAGAIN and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            hint = _HINTS.get(error.errno or 0, "")
            raise ConnectionLost(f"no daemon at {address}: {error.strerror}" + (hint and f" ({hint})")) from None
