"""A session on the same host: the handshake, what may go wrong in it, and what is left of it then."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from scripted import Do, ScriptedDaemon, wait_until, welcome

from headrace.channel import Channel, Closed
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, ProtocolError
from headrace.protocol import VERSION, Chunk, Failed, Goodbye, Refused, Welcome, encode
from headrace.session import Interrupted, Refusal, cut
from headrace.shm import SharedSession
from headrace.slots import Ring, SlotLayout


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.term()


@pytest.fixture
def wake() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


Answer = Callable[[Channel], None]


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[[Answer], str]]:
    """Answers one connection as the test says."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "x"))
    listener.listen()
    threads: list[threading.Thread] = []

    def serve(answer: Answer) -> None:
        connection, _ = listener.accept()
        channel = Channel(connection)
        try:
            channel.recv(timeout=10)
            answer(channel)
            channel.recv(timeout=10)
        except Closed:
            pass
        finally:
            channel.close()

    def start(answer: Answer) -> str:
        threads.append(threading.Thread(target=serve, args=(answer,)))
        threads[-1].start()
        return f"ipc://{tmp_path}/x"

    yield start
    for thread in threads:
        thread.join(20)
    listener.close()


def with_ring(message: Welcome, slots: int = 3, count: int = 1) -> Answer:
    def answer(channel: Channel) -> None:
        ring = Ring.create(SlotLayout(4, 2, 2), slots)
        channel.post(encode(message), [ring.fd] * count)
        ring.close()

    return answer


def test_a_session_gives_welcome_ring_and_chunks(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    with ScriptedDaemon(tmp_path / "d.sock") as daemon:
        session = SharedSession.open(daemon.address, None, context, timeout=10, stop=wake)
        assert session.welcome.samples == 40
        assert session.ring.slots == session.welcome.slots
        with pytest.raises(ValueError, match="read-only"):
            session.ring.views[0].images[0] = 1
        session.get(1, epoch=0, chunk=3, first=1, count=2)
        answers, lost = session.wait(wake)
        assert lost is None
        (answer,) = answers
        assert not isinstance(answer, Failed)
        assert isinstance(answer.message, Chunk)
        assert (answer.message.request, answer.first) == (1, 0)
        session.release(1)
        daemon.wait_released()
        session.close()
        session.close()
        wait_until(lambda: not daemon.sessions)


def test_waiting_ends_when_it_is_woken(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], wake: int) -> None:
    with ScriptedDaemon(tmp_path / "d.sock") as daemon:
        session = SharedSession.open(daemon.address, None, context, timeout=10, stop=wake)
        os.eventfd_write(wake, 1)
        assert session.wait(wake) == ([], None)
        session.close()


def test_the_end_of_the_daemon_is_noticed_at_once(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    with ScriptedDaemon(tmp_path / "d.sock") as daemon:
        session = SharedSession.open(daemon.address, None, context, timeout=10, stop=wake)
        daemon.close()
        assert session.wait(wake).lost == "the daemon ended"
        session.close()


@pytest.mark.parametrize(
    ("answer", "error", "named"),
    [
        (lambda c: c.post(encode(Goodbye(reason="maintenance"))), ConnectionLost, "stopping: maintenance"),
        (lambda c: c.close(), ConnectionLost, "closed the connection before it was ready"),
        (lambda c: c.post(b"\x01nonsense"), ProtocolError, "protocol version 1"),
        (lambda c: c.post(bytes([VERSION]) + b"nonsense"), ProtocolError, "not a message"),
        (with_ring(welcome(), count=0), ProtocolError, "0 rings"),
        (with_ring(welcome(transport="tcp")), ProtocolError, "transport tcp"),
        (with_ring(welcome(slots=4)), ProtocolError, "cannot be mapped"),
        (with_ring(welcome(endpoint="nowhere")), ProtocolError, "endpoint nowhere"),
        (with_ring(welcome(endpoint="tcp://192.0.2.1:5555")), ProtocolError, "is no ipc://PATH"),
    ],
)
def test_a_handshake_that_goes_wrong_says_how_and_leaves_nothing_open(
    listen: Callable[[Answer], str], context: zmq.Context[zmq.Socket[bytes]], wake: int,
    answer: Answer, error: type[HeadraceError], named: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=named):
        SharedSession.open(listen(answer), None, context, timeout=10, stop=wake)


def test_a_refusal_carries_the_error(
    listen: Callable[[Answer], str], context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    address = listen(lambda c: c.post(encode(Refused(kind="ConfigError", text="no stream 'b'; there is: a"))))
    with pytest.raises(Refusal) as caught:
        SharedSession.open(address, "b", context, timeout=10, stop=wake)
    assert isinstance(caught.value.error, ConfigError)
    assert "there is: a" in str(caught.value.error)


def test_silence_runs_into_the_deadline(
    listen: Callable[[Answer], str], context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    with pytest.raises(DeadlineError, match=r"does not answer: no progress for 0\.2 s"):
        SharedSession.open(listen(lambda c: None), None, context, timeout=0.2, stop=wake)


def test_closing_interrupts_the_handshake(
    listen: Callable[[Answer], str], context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    timer = threading.Timer(0.2, os.eventfd_write, (wake, 1))
    timer.start()
    before = time.monotonic()
    with pytest.raises(Interrupted):
        SharedSession.open(listen(lambda c: None), None, context, timeout=60, stop=wake)
    assert time.monotonic() - before < 30
    timer.join()


def test_closing_ends_the_connection_though_a_child_was_forked_in_the_handshake(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    copies: list[socket.socket] = []
    with ScriptedDaemon(tmp_path / "d.sock") as daemon:
        session = SharedSession.open(daemon.address, None, context, timeout=10, stop=wake)
        copies.append(session._lifeline._channel.sock.dup())  # as the child has it
        session.close()
        wait_until(lambda: not daemon.sessions)
        copies.pop().close()


def test_a_socket_without_the_other_one_beside_it_is_an_error(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    """As in a container that was given one of them: ZeroMQ would try for ever, without a word."""
    with ScriptedDaemon(tmp_path / "d.sock") as daemon:
        Path(daemon.address.removeprefix("ipc://") + ".zmq").unlink()
        with pytest.raises(ConnectionLost, match=r"d\.sock\.zmq, which is not here.* the folder of both"):
            SharedSession.open(daemon.address, None, context, timeout=10, stop=wake)
        wait_until(lambda: not daemon.sessions)


def test_a_slot_that_does_not_exist_is_an_error(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], wake: int
) -> None:
    with ScriptedDaemon(tmp_path / "d.sock", behave=lambda get: Do.NO_SLOT) as daemon:
        session = SharedSession.open(daemon.address, None, context, timeout=10, stop=wake)
        session.get(1, epoch=0, chunk=3, first=0, count=4)
        with pytest.raises(ProtocolError, match="slot 6 of 6"):
            session.wait(wake)
        session.close()


def edges(*ends: int) -> NDArray[np.int64]:
    return np.array(ends, np.int64)


TEXT = np.frombuffer(b"abcdef", np.uint8)


def test_texts_are_cut_where_they_end() -> None:
    assert cut(edges(1, 1, 3, 6), TEXT, 0, 4) == [b"a", b"", b"bc", b"def"]
    assert cut(edges(1, 1, 3, 6), TEXT, 2, 1) == [b"bc"]


@pytest.mark.parametrize("ends", [(3, 1), (-2, 0), (0, 7), (-9, -8)])
def test_texts_that_cannot_be_are_refused(ends: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError, match="texts that end before"):
        cut(edges(*ends, 6, 6), TEXT, 0, 2)
