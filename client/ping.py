"""Asking a daemon whether it is usable."""

from __future__ import annotations

import socket

from headrace import protocol
from headrace.channel import Channel, Closed
from headrace.errors import ConfigError, ConnectionLost, ProtocolError
from headrace.protocol import Ping, Pong


def ping(address: str, *, timeout: float = 5.0) -> Pong:
    """The daemon's answer.

    Args:
        address: `ipc://PATH`.
        timeout: seconds.

    Raises:
        ConfigError: not such an address.
        ConnectionLost: nobody listens there.
        DeadlineError: somebody does, and does not answer.
        ProtocolError: another version answers.
    """
    channel = connect(address, timeout=timeout)
    try:
        channel.send(protocol.encode(Ping()), timeout=timeout)
        reply = protocol.decode_session_reply(channel.recv(timeout=timeout)[0])
    except Closed:
        raise ConnectionLost(f"{address}: the daemon ended the connection without an answer") from None
    finally:
        channel.close()
    if not isinstance(reply, Pong):
        raise ProtocolError(f"{address}: {type(reply).__name__} is no answer to Ping")
    return reply


def connect(address: str, *, timeout: float) -> Channel:
    """A connection to the daemon's Unix socket.

    Raises:
        ConfigError: not an `ipc://` address.
        ConnectionLost: nobody listens there, or this user may not connect.
    """
    scheme, _, path = address.partition("://")
    if scheme != "ipc" or not path:
        raise ConfigError(f"{address!r} is no address of this version: it must be ipc://PATH")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise ConnectionLost(
            f"no daemon at {address}: {error.strerror or error}; start it with `headrace serve`"
        ) from error
    return Channel(sock, limit=protocol.DAEMON_LIMIT, descriptors=1)
