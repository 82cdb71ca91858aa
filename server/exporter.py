"""The HTTP port for whoever watches the daemon: `/metrics` for Prometheus, `/healthz` for a supervisor.

A thread of its own, which knows nothing but the last status that the daemon's loop has published, as bytes: whatever
is asked for here, however slowly, the loop does not notice. Nor do others who ask: visitors are served side by side,
so many at most, each with a deadline.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from dataclasses import dataclass, field

from headrace import protocol
from headrace.errors import ConfigError
from headrace.protocol import Pong
from headrace.server.listener import metrics_place

log = logging.getLogger(__name__)

#: Seconds that a client has for its request, and again for taking the answer.
_PATIENCE = 2.0
#: Seconds that the thread has for its end, which waits for nobody.
_END = 5.0
#: Bytes of a request, which has no body.
_LIMIT = 1 << 14
#: Seconds after which a status is too old: the loop publishes one a second.
STALE = 15.0
_BACKLOG = 16
#: Visitors at once: of more, the one who has been there longest is sent away.
_VISITORS = 32
_PLAIN = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed",
            500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


@dataclass(eq=False, slots=True)
class _Visit:
    """
    Attributes:
        until: when it is sent away.
        asked: what it has said so far.
        rest: of the answer, once there is one.
    """

    connection: socket.socket
    until: float
    asked: bytes = b""
    rest: memoryview = field(default_factory=lambda: memoryview(b""))


class Exporter:
    """Bound when made, and at work from `start` to `close`.

    Args:
        host, port: in numbers; port 0 is a free one.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        from headrace.server import metrics  # which imports prometheus-client, for those who want it

        self._text = metrics.text
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else taken while old answers fade
            self._socket.bind((host, port))
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise ConfigError(f"metrics: {place} cannot be listened at: {error.strerror}") from error
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        # Replaced as a whole by the loop, read as a whole by the thread: when, the Pong, what is wrong.
        self._published: tuple[float, bytes, str | None] | None = None
        self._page: tuple[bytes, bytes] | None = None  # the thread's: a status, and its text

    @classmethod
    def at(cls, place: str | None, *, insecure: bool) -> Exporter | None:
        """As a configuration's `metrics` says; None for none.

        Args:
            insecure: whether it may be where other hosts reach it.

        Raises:
            ConfigError: likewise, and for what `metrics_place` refuses.
        """
        return None if place is None else cls(*metrics_place(place, insecure=insecure))

    @property
    def address(self) -> str:
        """`http://HOST:PORT`"""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def publish(self, pong: Pong, trouble: str | None) -> None:
        """What is answered from now on.

        Args:
            trouble: why no picture can be had, if so.
        """
        self._published = time.monotonic(), protocol.encode(pong), trouble

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="headrace metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the port free. May be called twice."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join(_END)
            if self._thread.is_alive():  # what it still uses stays open
                log.error("the thread for metrics does not end")
                return
        self._socket.close()
        os.close(self._stop)
        self._stop = -1

    # -- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        visits: list[_Visit] = []  # who has been there longest comes first
        shut = 0.0  # until when nobody is let in
        try:
            while True:
                now = time.monotonic()
                poll = select.poll()
                poll.register(self._stop, select.POLLIN)
                if shut <= now:
                    poll.register(self._socket, select.POLLIN)
                for visit in visits:
                    poll.register(visit.connection, select.POLLOUT if visit.rest else select.POLLIN)
                times = [visit.until for visit in visits] + [shut] * (shut > now)
                ready = {fd for fd, _ in poll.poll(max(0.0, min(times) - now) * 1000 + 1 if times else None)}
                if self._stop in ready:
                    return
                now = time.monotonic()
                for visit in list(visits):
                    if (visit.connection.fileno() in ready and self._over(visit, now)) or visit.until <= now:
                        visit.connection.close()
                        visits.remove(visit)
                if self._socket.fileno() in ready:
                    try:
                        self._let_in(visits)
                    except OSError as error:  # no descriptor is left, for instance: it would be ready for ever
                        log.warning("metrics: %s", error)
                        shut = now + 1.0
        finally:
            for visit in visits:
                visit.connection.close()

    def _let_in(self, visits: list[_Visit]) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        visits.append(_Visit(connection, time.monotonic() + _PATIENCE))
        if len(visits) > _VISITORS:
            visits.pop(0).connection.close()

    def _over(self, visit: _Visit, now: float) -> bool:
        """Go on with a visitor as far as that goes without waiting; whether that was all."""
        try:
            if not visit.rest:
                more = visit.connection.recv(_LIMIT)
                visit.asked += more
                if b"\r\n\r\n" not in visit.asked:
                    return not more or len(visit.asked) > _LIMIT
                visit.rest, visit.until = memoryview(self._reply(visit.asked)), now + _PATIENCE
            visit.rest = visit.rest[visit.connection.send(visit.rest) :]
        except BlockingIOError:
            return False
        except OSError:
            return True
        except Exception:
            log.exception("metrics")
            return True
        return not visit.rest

    def _reply(self, asked: bytes) -> bytes:
        """To a request, which is whole."""
        method, _, rest = asked.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        try:
            status, kind, body = self._answer(method, path)
        except Exception as error:
            log.exception("metrics")
            status, kind, body = 500, _PLAIN, f"{error}\n".encode()
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Type: {kind}", f"Content-Length: {len(body)}",
                 "Connection: close"]  # fmt: skip
        if status == 405:
            lines.append("Allow: GET, HEAD")
        answer = "\r\n".join([*lines, "", ""]).encode()
        return answer if method == b"HEAD" else answer + body

    def _answer(self, method: bytes, path: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        if method not in (b"GET", b"HEAD"):
            return 405, _PLAIN, b"only GET and HEAD\n"
        if path not in (b"/metrics", b"/healthz"):
            return 404, _PLAIN, b"there is /metrics, and /healthz\n"
        published = self._published
        if published is None:
            return 503, _PLAIN, b"the daemon is starting\n"
        at, frame, trouble = published
        if (age := time.monotonic() - at) > STALE:
            return 503, _PLAIN, f"the daemon's loop has stood still for {age:.0f} s\n".encode()
        if path == b"/healthz":
            return (503, _PLAIN, f"{trouble}\n".encode()) if trouble else (200, _PLAIN, b"ok\n")
        if self._page is None or self._page[0] is not frame:  # however often it is asked for
            pong = protocol.decode_session_reply(frame)
            assert isinstance(pong, Pong)
            self._page = frame, self._text(pong)
        return 200, _METRICS, self._page[1]
