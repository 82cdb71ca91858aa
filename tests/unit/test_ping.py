"""Asking a daemon whether it is usable, at its Unix socket and over tcp."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from scripted import ScriptedDaemon

from headrace.channel import Channel
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, ProtocolError
from headrace.ping import ask, ping
from headrace.protocol import VERSION, Goodbye, encode
from headrace.session import Interrupted

Answering = Callable[[bytes | None], str]


@pytest.fixture
def wake() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.fixture(params=["ipc", "tcp"])
def answering(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Answering]:
    """An address at which the first message is answered with these bytes, or with nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.bind("tcp://127.0.0.1:*")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "x"))
    listener.listen()
    listener.settimeout(10)
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def over_tcp(words: bytes | None) -> None:
        while not stop.is_set():
            if router.poll(20):
                identity, _ = router.recv_multipart()
                if words is not None:
                    router.send_multipart([identity, words])

    def at_the_socket(words: bytes | None) -> None:
        channel = Channel(listener.accept()[0])
        channel.recv(timeout=10)
        if words is not None:
            channel.post(words)
        stop.wait(10)
        channel.close()

    def start(words: bytes | None) -> str:
        threads.append(threading.Thread(target=over_tcp if request.param == "tcp" else at_the_socket, args=(words,)))
        threads[-1].start()
        if request.param == "ipc":
            return f"ipc://{tmp_path}/x"
        return router.last_endpoint.decode().rstrip("\0")  # type: ignore[union-attr]

    yield start
    stop.set()
    for thread in threads:
        thread.join(20)
    listener.close()
    router.close()
    context.term()


def test_ping_is_answered_over_tcp_and_at_the_unix_socket_by_the_same_daemon(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path / "d.sock") as daemon:
        there, here = ping(daemon.tcp_address), ping(daemon.address)
        assert there.instance == here.instance == daemon.instance
        assert there.address == daemon.address


def test_silence_runs_into_the_deadline(answering: Answering) -> None:
    with pytest.raises(DeadlineError, match=r"the daemon does not answer within 0\.3 s"):
        ping(answering(None), timeout=0.3)


@pytest.mark.parametrize(
    ("words", "error", "named"),
    [
        (encode(Goodbye(reason="x")), ProtocolError, "Goodbye is no answer to Ping"),
        (bytes([VERSION + 1]) + b"x", ProtocolError, f"protocol version {VERSION + 1}, this side speaks {VERSION}"),
        (bytes([VERSION]) + b"x", ProtocolError, "not a message"),
    ],
)
def test_a_wrong_answer_is_told(answering: Answering, words: bytes, error: type[HeadraceError], named: str) -> None:
    with pytest.raises(error, match=named):
        ping(answering(words), timeout=10)


def test_asking_is_interrupted(answering: Answering, wake: int) -> None:
    timer = threading.Timer(0.2, os.eventfd_write, (wake, 1))
    timer.start()
    before = time.monotonic()
    with pytest.raises(Interrupted):
        ask(answering(None), timeout=60, stop=wake)
    assert time.monotonic() - before < 30
    timer.join()


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="no daemon was started there"):
        ping(f"ipc://{tmp_path}/x", timeout=60)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionLost, match="nobody listens at this port"):
            ping(f"tcp://127.0.0.1:{sock.getsockname()[1]}", timeout=60)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be ipc://PATH or tcp://HOST:PORT"):
        ping("udp://x:1")
