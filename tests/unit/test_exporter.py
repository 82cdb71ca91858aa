"""The HTTP port: what is answered when, and that nobody who asks for it can hold up another."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from status import pong

from headrace.errors import ConfigError
from headrace.protocol import Pong
from headrace.server import exporter as module
from headrace.server import metrics
from headrace.server.exporter import Exporter


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter("127.0.0.1", 0)
    made.start()
    yield made
    made.close()
    made.close()  # which is allowed


def place(exporter: Exporter) -> tuple[str, int]:
    host, _, port = exporter.address.removeprefix("http://").rpartition(":")
    return host, int(port)


def ask(exporter: Exporter, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection(*place(exporter), timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def test_before_the_daemons_loop_has_said_anything_it_is_starting(exporter: Exporter) -> None:
    assert ask(exporter, "/healthz")[::2] == (503, "the daemon is starting\n")
    assert ask(exporter, "/metrics")[0] == 503


def test_metrics_are_those_of_the_last_status(exporter: Exporter) -> None:
    for workers in ([1], [1, 2, 3]):
        status = pong(workers=workers)
        exporter.publish(status, None)
        code, kind, body = ask(exporter, "/metrics")
        assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert body == metrics.text(status).decode() and f"headrace_workers {len(workers)}.0\n" in body
    assert ask(exporter, "/metrics?collect[]=all")[0] == 200


def test_a_status_that_changes_after_it_was_published_changes_nothing(exporter: Exporter) -> None:
    workers = [1]
    exporter.publish(pong(workers=workers), None)
    workers.append(2)
    assert "headrace_workers 1.0\n" in ask(exporter, "/metrics")[2]


def test_health_is_that_of_the_daemon(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter.publish(pong(), None)
    assert ask(exporter, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    exporter.publish(pong(), "workers end before they are ready")
    assert ask(exporter, "/healthz")[::2] == (503, "workers end before they are ready\n")
    assert ask(exporter, "/metrics")[0] == 200
    monkeypatch.setattr(module, "STALE", -1.0)
    for path in ("/healthz", "/metrics"):
        assert ask(exporter, path)[::2] == (503, "the daemon's loop has stood still for 0 s\n")


def test_there_is_nothing_else(exporter: Exporter) -> None:
    exporter.publish(pong(), None)
    assert ask(exporter, "/")[::2] == (404, "there is /metrics, and /healthz\n")
    assert ask(exporter, "/metrics/../etc/passwd")[0] == 404
    assert ask(exporter, "/metrics", "POST")[0] == 405
    assert ask(exporter, "/healthz", "HEAD")[::2] == (200, "")


def test_a_fault_of_ours_is_an_answer_and_no_end(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(status: Pong) -> bytes:
        raise ValueError("a fault")

    exporter.publish(pong(), None)
    with monkeypatch.context() as patch:
        patch.setattr(exporter, "_text", fail)
        assert ask(exporter, "/metrics")[::2] == (500, "a fault\n")
    assert ask(exporter, "/metrics")[0] == 200


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\n", b"\0" * 20000, b"\r\n\r\n"])
def test_who_says_no_request_is_sent_away_and_others_are_answered(exporter: Exporter, said: bytes) -> None:
    exporter.publish(pong(), None)
    with socket.create_connection(place(exporter), timeout=20) as other:
        other.sendall(said)
        assert ask(exporter, "/healthz")[0] == 200
        other.settimeout(20)
        try:
            assert not other.recv(1 << 16) or said == b"\r\n\r\n"
        except ConnectionResetError:
            pass


def test_who_is_slow_does_not_hold_up_others(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A health check gives up after a second, and its supervisor ends the daemon."""
    monkeypatch.setattr(module, "_PATIENCE", 600.0)
    exporter.publish(pong(), None)
    with contextlib.ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(place(exporter), timeout=20)) for _ in range(40)]
        for one in slow:
            one.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert ask(exporter, "/healthz")[0] == 200
        assert not slow[0].recv(1)  # there are too many
        slow[-1].sendall(b"\r\n")
        assert slow[-1].recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_a_long_answer_is_sent_as_it_is_taken(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(range(256)) * (1 << 15)
    monkeypatch.setattr(exporter, "_text", lambda status: body)
    exporter.publish(pong(), None)
    with socket.create_connection(place(exporter), timeout=20) as other:
        other.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert ask(exporter, "/healthz")[0] == 200
        with other.makefile("rb") as file:
            assert file.read().endswith(b"\r\n\r\n" + body)


def test_who_says_only_half_a_request_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 60.0)
    heard, over = threading.Event(), Exporter._over
    monkeypatch.setattr(Exporter, "_over", lambda self, visit, now: (heard.set(), over(self, visit, now))[1])
    made = Exporter("127.0.0.1", 0)
    made.start()
    made.publish(pong(), None)
    where = place(made)
    with socket.create_connection(where, timeout=20) as other:
        other.sendall(b"GET /metrics")
        assert heard.wait(20)
        begin = time.monotonic()
        made.close()
        assert time.monotonic() - begin < 30
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=20)


def test_a_port_that_is_taken_is_an_error_that_names_it(exporter: Exporter) -> None:
    host, port = place(exporter)
    with pytest.raises(ConfigError, match=f"^metrics: 127.0.0.1:{port} cannot be listened at: Address already in use"):
        Exporter(host, port)


def test_one_that_never_started_can_be_closed() -> None:
    Exporter("127.0.0.1", 0).close()


def test_it_listens_at_ipv6_too() -> None:
    try:
        made = Exporter("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    made.start()
    made.publish(pong(), None)
    assert made.address.startswith("http://[::1]:")
    port = int(made.address.rpartition(":")[2])
    connection = http.client.HTTPConnection("::1", port, timeout=20)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
    made.close()
