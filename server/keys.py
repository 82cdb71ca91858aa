"""Who may connect over tcp: the daemon's own keys, those of its clients, and the question that libzmq asks of each.

libzmq asks by ZAP, over a socket inside this process, and lets nobody in before it is answered. It is answered in the
daemon's loop. A socket on which nobody would answer lets nobody in.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from headrace.errors import ConfigError
from headrace.keys import PUBLIC, Pair, check_closed, read_pair, read_public
from headrace.pipeline.index import shown
from headrace.pipeline.spec import Curve
from headrace.workers.loop import Loop

log = logging.getLogger(__name__)

#: Where libzmq looks for who answers, and by what name it calls us.
_PLACE = "inproc://zeromq.zap.01"
_DOMAIN = b"headrace"
_VERSION = b"1.0"
#: Questions that are answered in one turn of the loop.
_TURN = 256
#: Seconds between two lines about those who were turned away.
_SAY = 60.0


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """
    Attributes:
        own: proves the daemon to its clients.
        clients: what to call them, by their public keys in 32 bytes.
    """

    own: Pair
    clients: Mapping[bytes, str]

    @classmethod
    def load(cls, curve: Curve) -> ServerKeys | None:
        """What the configuration names; None where it names none.

        Raises:
            ConfigError: as `read_pair` and `read_public`; or a folder holds no key.
        """
        if curve.secret_key is None:
            return None
        own = read_pair(curve.secret_key, "curve.secret_key")
        files = [file for place in curve.clients for file in _files(place)]
        clients = {z85.decode(read_public(file, "curve.clients")): shown(os.fsencode(file.stem)) for file in files}
        return cls(own, clients)


class Gate:
    """
    Args:
        context: whose sockets it answers for.
        loop: calls back for questions.
        keys: of the daemon and its clients.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], loop: Loop, keys: ServerKeys) -> None:
        self._loop = loop
        self._keys = keys
        self._unknown = 0
        self._nameless = 0  # connections that ended without a word, less those that are accounted for
        self._last = ""
        self._said = -_SAY
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_PLACE)
        loop.watch(self._socket, self._asked)

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Encrypt what is bound by this socket from now on, and let in none but these clients."""
        router.curve_server = True
        router.curve_secretkey = self._keys.own.secret
        router.zap_domain = _DOMAIN
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it a gate that is missing would be an open one

    def ended(self) -> None:
        """A connection is over on which no message came."""
        self._nameless += 1

    def hung_up(self) -> None:
        """One of those has ended itself before it could be judged, as who only looks does, or was too slow."""
        self._nameless -= 1

    @property
    def _keyless(self) -> int:
        """Who had no key, or took the daemon for another."""
        return max(0, self._nameless)

    def tick(self) -> None:
        """Say who was turned away, at once and then once a minute."""
        if time.monotonic() - self._said >= _SAY:
            self._say()

    def _say(self) -> None:
        keyless = self._keyless
        if not self._unknown + keyless:
            return
        self._said = time.monotonic()
        log.warning(
            "connections over tcp turned away: %d with keys that `curve.clients` does not name%s; %d without a key, or "
            "for another daemon than that of the key %s",
            self._unknown,
            self._last,
            keyless,
            self._keys.own.public.decode(),
        )
        self._unknown = 0
        self._nameless -= keyless
        self._last = ""

    def close(self) -> None:
        """To be called after the sockets that it answers for were closed."""
        self._say()
        self._loop.unwatch(self._socket)
        self._socket.close(0)

    def _asked(self) -> None:
        for _ in range(_TURN):
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(question), zmq.NOBLOCK)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """ZAP's reply: version, request, status, its text, the user, metadata."""
        request = question[1] if len(question) > 1 else b""
        match question:
            case [version, _, domain, address, _, mechanism, key] if (
                (version, domain, mechanism, len(key)) == (_VERSION, _DOMAIN, b"CURVE", 32)
            ):  # fmt: skip
                if (name := self._keys.clients.get(key)) is not None:
                    return [_VERSION, request, b"200", b"OK", name.encode(), b""]
                self._unknown += 1
                self._nameless -= 1  # it will end, and that without a word
                self._last = f", the last one {z85.encode(key).decode()} from {shown(address)}"
        return [_VERSION, request, b"400", b"", b"", b""]


def _files(place: Path) -> list[Path]:
    """A file, or those of a folder that hold public keys."""
    try:
        status = place.stat()
        if not stat.S_ISDIR(status.st_mode):
            return [place]
        check_closed(place, status, "curve.clients")
        found = sorted(file for file in place.iterdir() if file.suffix == PUBLIC and not file.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"curve.clients: {place} cannot be read: {error.strerror}") from None
    if not found:
        raise ConfigError(f"curve.clients: no NAME{PUBLIC} is in {place}, so nobody could connect")
    return found
