"""Addresses of a daemon, and the way to one."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from typing import Any, Literal

from headrace.channel import Channel
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, ProtocolError
from headrace.protocol import DAEMON_LIMIT
from headrace.session import LONGEST_POLL, Interrupted

#: Bytes of the longest path of a Unix socket, without the closing zero.
LONGEST_PATH = 107

#: Seconds that a daemon's ZeroMQ takes to greet at most: no work of its own keeps it from that.
_GREETING = 10.0

#: How ZMTP 3 begins; of its whole greeting the length, where the security mechanism is, and the rest where it is none.
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03"
_LENGTH = 64
_KEYLESS = b"\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_MECHANISM = slice(12, 32)

#: Seconds between attempts at a Unix socket whose queue of connections is full.
_FULL = 0.02

_HINTS = {
    errno.ENOENT: "no daemon was started there: start it first, `headrace serve CONFIG`",
    errno.ECONNREFUSED: "the daemon that was there is gone: start it again, `headrace serve CONFIG`",
    errno.EACCES: "its `socket.group` says who besides its user may connect",
}

_TCP_HINTS = {
    errno.ECONNREFUSED: "nobody listens at this port: start the daemon there, with this address in its `listen`",
}


def scheme(address: str) -> Literal["ipc", "tcp"]:
    """The kind of an address that is one.

    Raises:
        ConfigError: it is none.
    """
    if address.startswith("tcp://"):
        tcp_place(address)
        return "tcp"
    socket_path(address)
    return "ipc"


def socket_path(address: str) -> str:
    """The path in `ipc://PATH`.

    Raises:
        ConfigError: another kind of address, or a path too long for a Unix socket.
    """
    kind, _, path = address.partition("://")
    if kind != "ipc" or not path:
        raise ConfigError(f"{address!r} is no address: it must be ipc://PATH or tcp://HOST:PORT")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(
            f"{address}: the path has {len(os.fsencode(path))} bytes, a Unix socket at most {LONGEST_PATH}"
        )
    return path


def tcp_place(address: str) -> tuple[str, int]:
    """Host and port in `tcp://HOST:PORT`; an IPv6 address stands in brackets.

    Raises:
        ConfigError: not such an address.
    """
    kind, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "[" in host:
        raise ConfigError(f"{address}: an IPv6 address stands in brackets, tcp://[::1]:5555")
    if kind != "tcp" or not host:
        raise ConfigError(f"{address!r} is no address: it must be tcp://HOST:PORT")
    if host == "*":
        raise ConfigError(f"{address}: name the host on which the daemon runs; * is for its `listen`")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{address}: the port must be a number from 1 to 65535")
    return host, int(port)


def connect(address: str, *, timeout: float, stop: int | None = None) -> Channel:
    """A connection to the daemon's Unix socket.

    Args:
        timeout: seconds.
        stop: a descriptor; when it becomes readable, `Interrupted` is raised.

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
                _pause(_FULL, stop)
                continue
            hint = _HINTS.get(error.errno or 0, "")
            raise ConnectionLost(f"no daemon at {address}: {error.strerror}" + (hint and f" ({hint})")) from None


def _pause(seconds: float, stop: int | None) -> None:
    poll = select.poll()
    if stop is not None:
        poll.register(stop, select.POLLIN)
    if poll.poll(1000 * seconds):
        raise Interrupted


def reach(address: str, *, timeout: float, stop: int, keys: bool = False) -> str:
    """ZeroMQ's endpoint, by number, of the daemon at `tcp://HOST:PORT`.

    ZeroMQ tells nobody why it cannot connect, so it is tried here before, and the greeting is looked at, which says too
    whether the daemon wants keys.

    Args:
        timeout: seconds, apart from those that the system's resolver takes.
        keys: whether this client has some. Then a daemon that wants none is refused: it may be somebody else's.
        stop: a descriptor; when it becomes readable, `Interrupted` is raised.

    Raises:
        ConfigError: not a `tcp://` address; or only one side has keys.
        ConnectionLost: the host is not known, or nobody listens there.
        DeadlineError: there is no answer.
        ProtocolError: what greets there is no daemon.
    """
    host, port = tcp_place(address)
    deadline = time.monotonic() + timeout
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConnectionLost(f"no daemon at {address}: the host {host!r} is not known: {error}") from None
    trouble: OSError | None = None
    for left, (family, kind, protocol, _, place) in zip(range(len(found), 0, -1), found, strict=True):
        share = (deadline - time.monotonic()) / left
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # a host without IPv6, for one
            trouble = error
            continue
        with sock:
            try:
                _connect(sock, place, time.monotonic() + share, stop)
            except OSError as error:
                trouble = error
                continue
            greeting = _greeting(sock, address, min(_GREETING, share), stop)
            if not keys and greeting[_MECHANISM].startswith(b"CURVE"):
                with contextlib.suppress(OSError):
                    sock.sendall(_KEYLESS)  # so that the daemon's log tells of it
        _agree(greeting, address, keys=keys)
        name, _ = socket.getnameinfo(place, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
        return f"tcp://[{name}]:{port}" if family == socket.AF_INET6 else f"tcp://{name}:{port}"
    assert trouble is not None
    if trouble.errno == errno.ETIMEDOUT:
        raise DeadlineError(f"no answer from {address} within {timeout:g} s: no such host, or a firewall before it")
    hint = _TCP_HINTS.get(trouble.errno or 0, "")
    raise ConnectionLost(f"no daemon at {address}: {trouble.strerror}" + (hint and f" ({hint})"))


def _connect(sock: socket.socket, place: Any, deadline: float, stop: int) -> None:
    sock.setblocking(False)
    problem = sock.connect_ex(place)
    if problem == errno.EINPROGRESS:
        if not _ready(sock, select.POLLOUT, deadline, stop):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


def _greeting(sock: socket.socket, address: str, seconds: float, stop: int) -> bytes:
    """All of ZeroMQ's, or as much as shows that it is none."""
    deadline = time.monotonic() + seconds
    data = b""
    try:
        sock.sendall(_SIGNATURE)  # to a buffer that is empty yet
        while len(data) < _LENGTH and data.startswith(b"\xff"[: len(data)]):
            if not _ready(sock, select.POLLIN, deadline, stop):
                said = "no more" if data else "nothing"
                raise DeadlineError(
                    f"what listens at {address} says {said} for {seconds:.2g} s: the daemon there is stopped, or it is "
                    "another service's port"
                )
            if not (more := sock.recv(_LENGTH - len(data))):
                break
            data += more
    except DeadlineError:
        raise
    except OSError:
        pass
    if len(data) < _LENGTH and data.startswith(b"\xff"[: len(data)]):  # a daemon that ends, or the network before it
        when = "in the middle of its greeting" if data else "at once"
        raise ConnectionLost(f"what listens at {address} ended the connection {when}")
    return data


def _agree(greeting: bytes, address: str, *, keys: bool) -> None:
    """Raises what `reach` does where daemon and client do not agree about keys."""
    if len(greeting) < _LENGTH or not greeting.startswith(b"\xff"):
        raise ProtocolError(f"what listens at {address} is no daemon of this kind: it begins with {greeting!r}")
    mechanism = greeting[_MECHANISM].rstrip(b"\0")
    if mechanism not in (b"NULL", b"CURVE"):
        raise ProtocolError(f"what listens at {address} is no daemon of this kind: it wants {mechanism!r}")
    wanted = mechanism == b"CURVE"
    if wanted and not keys:
        raise ConfigError(
            f"the daemon at {address} wants keys: make some with `headrace keygen`, name the public one in its "
            '`curve.clients`, and give this side curve={"secret_key": FILE, "server": FILE}'
        )
    if keys and not wanted:
        raise ConfigError(
            f"what listens at {address} has no keys and encrypts nothing, and is refused because keys were given: they "
            "are wrong here, or the daemon lacks `curve` in its configuration"
        )


def _ready(sock: socket.socket, events: int, deadline: float, stop: int) -> bool:
    poll = select.poll()
    poll.register(sock, events)
    poll.register(stop, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(1000 * min(max(0, deadline - time.monotonic()), LONGEST_POLL))]
    if stop in ready:
        raise Interrupted
    return bool(ready)
