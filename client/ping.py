"""Asking a daemon whether it is usable."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from headrace.channel import Closed
from headrace.connect import connect, scheme
from headrace.errors import ConnectionLost, DeadlineError, ProtocolError
from headrace.keys import Keys
from headrace.lifeline import wait_readable
from headrace.protocol import Message, Ping, Pong, decode_session_reply, encode
from headrace.tcp import ask_there


def ping(address: str, *, timeout: float = 5.0, curve: Mapping[str, Any] | None = None) -> Pong:
    """The daemon's answer.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`.
        timeout: seconds.
        curve: keys for a `tcp://` address, as the Loader's.

    Raises:
        ConfigError: not such an address, or keys that do not fit.
        ConnectionLost: nobody listens there.
        DeadlineError: somebody does, and does not answer.
        ProtocolError: another version answers, or something that is no daemon.
    """
    keys = Keys.load(curve)
    never = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return ask(address, timeout=timeout, stop=never, detail=True, keys=keys)
    finally:
        os.close(never)


def ask(address: str, *, timeout: float, stop: int, detail: bool = False, keys: Keys | None = None) -> Pong:
    """As `ping`, with what `Ping.detail` asks for; raises `Interrupted` when the descriptor `stop` becomes readable."""
    question = Ping(detail=detail)
    if scheme(address) == "tcp":
        reply = ask_there(address, question, timeout=timeout, stop=stop, keys=keys)
    else:
        reply = _ask_here(address, question, timeout=timeout, stop=stop)
    if not isinstance(reply, Pong):
        raise ProtocolError(f"{address}: {type(reply).__name__} is no answer to Ping")
    return reply


def _ask_here(address: str, question: Ping, *, timeout: float, stop: int) -> Message:
    deadline = time.monotonic() + timeout
    channel = connect(address, timeout=timeout, stop=stop)
    try:
        channel.post(encode(question))
        while not (frames := channel.receive()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{address}: the daemon does not answer within {timeout:g} s")
            wait_readable(channel, stop, left)
        data, fds = frames[0]
        for fd in fds:
            os.close(fd)
        return decode_session_reply(data)
    except Closed:
        raise ConnectionLost(f"{address}: the daemon ended the connection without an answer") from None
    finally:
        channel.close()
