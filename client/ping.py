"""Asking a daemon whether it is usable."""

from __future__ import annotations

from headrace import protocol
from headrace.channel import Closed
from headrace.connect import connect
from headrace.errors import ConnectionLost, DeadlineError, ProtocolError
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
    except DeadlineError:
        raise DeadlineError(f"{address}: the daemon does not answer within {timeout:g} s") from None
    finally:
        channel.close()
    if not isinstance(reply, Pong):
        raise ProtocolError(f"{address}: {type(reply).__name__} is no answer to Ping")
    return reply
