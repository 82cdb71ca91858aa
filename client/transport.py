"""Which way chunks come: through shared memory from a daemon on this host, over tcp from another."""

from __future__ import annotations

import logging
from typing import Literal

import zmq

from headrace.connect import scheme
from headrace.errors import ConfigError, HeadraceError
from headrace.keys import Keys
from headrace.ping import ask
from headrace.session import Part
from headrace.shm import SharedSession
from headrace.tcp import RemoteSession

log = logging.getLogger(__name__)

Transport = Literal["auto", "shm", "tcp"]

#: Seconds that a daemon that has just answered over tcp may take to answer at its Unix socket.
_NEAR = 5.0


def open_session(
    address: str,
    stream: str | None,
    transport: Transport,
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    timeout: float,
    stop: int,
    device: str = "",
    keys: Keys | None = None,
) -> Part:
    """Connect, say `Hello` and wait for `Welcome`, however long the listing takes while it makes progress.

    Args:
        address: of the daemon.
        stream: its name, or None where there is just one.
        timeout: seconds without progress.
        stop: a descriptor; when it becomes readable, `Interrupted` is raised.
        device: PCI bus id of the GPU that batches go to; "": none. A daemon on another host is not told.
        keys: for a `tcp://` address; None: the daemon wants none.

    Raises:
        Refusal: the daemon says no.
        ConfigError: not an address, or `shm` and the daemon is on another host; or keys that do not fit.
        ConnectionLost: nobody listens there, or the connection ended.
        DeadlineError: no progress.
        ProtocolError: an answer that this version cannot take.
    """
    remote = scheme(address) == "tcp"
    if remote and transport != "tcp":
        unix = _on_this_host(address, timeout=timeout, stop=stop, keys=keys)
        if isinstance(unix, str):
            log.info("the daemon at %s is on this host, at %s: rows come through shared memory", address, unix)
            address, remote = unix, False
        elif transport == "shm":
            raise ConfigError(
                f"transport: shm needs a daemon on this host, and the one at {address} is not: {unix}; use 'tcp'"
            )
        else:
            log.info("the daemon at %s is not on this host (%s): rows come over tcp", address, unix)
    if remote:
        return RemoteSession.open(address, stream, context, timeout=timeout, stop=stop, keys=keys)
    if transport == "tcp":
        return RemoteSession.open_here(address, stream, context, timeout=timeout, stop=stop, device=device)
    return SharedSession.open(address, stream, context, timeout=timeout, stop=stop, device=device)


def _on_this_host(address: str, *, timeout: float, stop: int, keys: Keys | None) -> str | HeadraceError:
    """The daemon's `ipc://` address if it is reached there, or else why not."""
    there = ask(address, timeout=timeout, stop=stop, keys=keys)
    if not there.address.startswith("ipc://"):  # nobody is sent to another host
        return HeadraceError(f"it says that its Unix socket is at {there.address}")
    try:
        here = ask(there.address, timeout=min(timeout, _NEAR), stop=stop)
    except HeadraceError as error:
        return error
    if here.instance != there.instance:
        return HeadraceError(f"another daemon is at {there.address} here")
    return there.address
