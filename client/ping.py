"""Asking a daemon whether it is usable."""

from __future__ import annotations

import os
import time

from headrace.channel import Closed
from headrace.connect import connect, scheme
from headrace.errors import ConnectionLost, DeadlineError, ProtocolError
from headrace.lifeline import wait_readable
from headrace.protocol import Message, Ping, Pong, decode_session_reply, encode
from headrace.tcp import ask_there


def ping(address: str, *, timeout: float = 5.0) -> Pong:
    """The daemon's answer.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`.
        timeout: seconds.

    Raises:
        ConfigError: not such an address.
        ConnectionLost: nobody listens there.
        DeadlineError: somebody does, and does not answer.
        ProtocolError: another version answers, or something that is no daemon.
    """
    never = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        return ask(address, timeout=timeout, stop=never, detail=True)
    finally:
        os.close(never)


def ask(address: str, *, timeout: float, stop: int, detail: bool = False) -> Pong:
    """As `ping`, with what `Ping.detail` asks for; raises `Interrupted` when the descriptor `stop` becomes readable."""
    reply = (ask_there if scheme(address) == "tcp" else _ask_here)(
        address, Ping(detail=detail), timeout=timeout, stop=stop
    )
    if not isinstance(reply, Pong):
        raise ProtocolError(f"{address}: {type(reply).__name__} is no answer to Ping")
    return reply


def _ask_here(address: str, question: Ping, *, timeout: float, stop: int) -> Message:
    deadline = time.monotonic() + timeout
    channel = connect(address, timeout=timeout)
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
