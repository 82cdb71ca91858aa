"""A session over tcp: its handshake, what it takes for rows and what not, and what is left of it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from scripted import Do, ScriptedDaemon, index_of, level, text_of, wait_until, welcome

from headrace import tcp
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, ProtocolError
from headrace.protocol import Failed, Get, Goodbye, Hello, Message, Refused, Rows, Unknown, decode_remote, encode
from headrace.session import Delivery, Interrupted, Refusal
from headrace.slots import SlotLayout
from headrace.tcp import RemoteSession, RowsDelivery

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    left = [sock for sock in made._sockets if not sock.closed]
    made.destroy(0)  # `term` would wait for them
    assert not left


@pytest.fixture
def wake() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.fixture
def socket_file(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


@pytest.fixture(params=["another host", "this host"])
def open_session(request: pytest.FixtureRequest, context: Context, wake: int) -> Callable[..., RemoteSession]:
    """Opens a session, at the daemon's tcp address or at its Unix socket."""

    def open_one(daemon: ScriptedDaemon, stream: str | None = None, timeout: float = 10) -> RemoteSession:
        if request.param == "another host":
            return RemoteSession.open(daemon.tcp_address, stream, context, timeout=timeout, stop=wake)
        return RemoteSession.open_here(daemon.address, stream, context, timeout=timeout, stop=wake)

    return open_one


Open = Callable[..., RemoteSession]


def answer(session: RemoteSession, wake: int) -> Any:
    """The next one."""
    while True:
        answers, lost = session.wait(wake)
        assert lost is None
        if answers:
            (one,) = answers
            return one


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_session_brings_the_rows_that_were_asked_for(
    socket_file: Path, open_session: Open, wake: int, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    monkeypatch.setattr(tcp, "lanes_wanted", lambda: lanes)
    with ScriptedDaemon(socket_file, columns=["a", "b"], split=2, chunk=8) as daemon:
        session = open_session(daemon)
        assert session.welcome.samples == 40
        assert len(next(iter(daemon.remote.values())).lanes) == lanes
        for number, (first, count) in enumerate([(0, 8), (1, 2), (3, 5), (7, 1)]):
            session.get(number, epoch=2, chunk=3, first=first, count=count)
            rows: Delivery = answer(session, wake)
            assert (daemon.gets[-1].first, daemon.gets[-1].count) == (first, count)
            assert rows.first == first
            assert rows.sound()
            assert isinstance(rows.message, Rows)
            positions = range(24 + first, 24 + first + count)
            indices = [index_of(p, 40) for p in positions]
            assert rows.indices.tolist() == indices
            assert rows.labels.tolist() == [i // 10 for i in indices]
            for start in range(first, first + count):
                size = first + count - start
                levels = np.concatenate([*rows.images(start, size)])
                assert levels.shape == (size, 2, 3, 3)
                assert levels[:, 0, 0, 0].tolist() == [level(2, p) for p in positions[start - first :]]
                assert [msgspec.msgpack.decode(text) for text in rows.texts(start, size)] == [
                    text_of(i, "numbers", ["a", "b"]) for i in indices[start - first :]
                ]
            session.release(number)
        session.close()
        session.close()
        wait_until(lambda: not daemon.remote)


def test_leaving_is_said_on_another_host(socket_file: Path, context: Context, wake: int) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        session = RemoteSession.open(daemon.tcp_address, None, context, timeout=10, stop=wake)
        session.close()
        wait_until(lambda: daemon.left == [session.welcome.token])


def test_rows_may_come_with_more_than_was_asked_for(socket_file: Path, open_session: Open, wake: int) -> None:
    with ScriptedDaemon(socket_file, behave=lambda get: Do.WHOLE_CHUNK) as daemon:
        session = open_session(daemon)
        session.get(1, epoch=0, chunk=3, first=1, count=2)
        rows = answer(session, wake)
        assert (rows.first, len(rows.status)) == (0, 4)
        session.close()


@pytest.mark.parametrize(
    ("do", "named"),
    [
        (Do.GARBAGE, "not a message"),
        (Do.SHORT_FRAME, r"2 rows came in frames of \[35, 16, 16, 2, 16, \d+\] bytes instead of \[36, 16, 16, 2, 16,"),
        (Do.LONG_FRAME, r"\d+ bytes of text came instead of \d+"),
        (Do.FRAME_LESS, "2 rows came in frames of"),
        (Do.FRAME_MORE, "2 rows came in frames of"),
        (Do.MORE_TEXT, "bytes of text came instead of"),
        (Do.OTHER_ROWS, "rows 2 to 3 came for request 1, which asked for 1 to 2"),
        (Do.BEYOND, "rows 4 to 5 came for request 1"),
        (Do.OTHER_REQUEST, "an answer to request 1001, which is not open"),
        (Do.TWICE, "an answer to request 1, which is not open"),
        (Do.STRANGE_REJECT, "rejects in other rows than 1 to 2"),
        (Do.BEHIND_FAILED, "Failed with 5 frames behind it"),
    ],
)
def test_rows_that_are_not_just_what_was_asked_for_are_refused(
    socket_file: Path, open_session: Open, wake: int, do: Do, named: str
) -> None:
    columns = [] if do is Do.BEHIND_FAILED else ["a"]
    with ScriptedDaemon(socket_file, behave=lambda get: do, columns=columns) as daemon:
        session = open_session(daemon)
        session.get(1, epoch=0, chunk=3, first=1, count=2)
        if do is Do.BEHIND_FAILED:
            named = "Failed with 4 frames behind it"
        with pytest.raises(ProtocolError, match=named):
            while True:
                session.wait(wake)
        session.close()


def test_what_was_taken_back_may_still_come_and_is_dropped(socket_file: Path, open_session: Open, wake: int) -> None:
    held = threading.Event()

    def behave(get: Get) -> Do:
        held.wait(10)
        return Do.FAIL if get.request == 2 else Do.ANSWER

    with ScriptedDaemon(socket_file, behave=behave) as daemon:
        session = open_session(daemon)
        for number in (1, 2, 3):
            session.get(number, epoch=0, chunk=number, first=0, count=4)
        session.cancel(3)
        session.get(4, epoch=0, chunk=9, first=0, count=4)
        held.set()
        assert answer(session, wake).message.request == 4
        assert daemon.cancelled == [3]
        session.close()


def test_a_failure_is_answered_by_name(socket_file: Path, open_session: Open, wake: int) -> None:
    with ScriptedDaemon(socket_file, behave=lambda get: Do.FAIL) as daemon:
        session = open_session(daemon)
        session.get(1, epoch=0, chunk=3, first=0, count=4)
        failed = answer(session, wake)
        assert isinstance(failed, Failed)
        assert failed.text == "chunk 3: EIO"
        session.close()


@pytest.mark.parametrize(
    ("do", "named"),
    [
        (Do.UNKNOWN, "the daemon does not know this session"),
        (Do.GOODBYE, "the daemon ended the session: maintenance|the daemon ended"),
        (Do.VANISH, "the connection to the daemon ended|the daemon ended"),
    ],
)
def test_the_sessions_end_is_noticed_at_once(
    socket_file: Path, open_session: Open, wake: int, do: Do, named: str
) -> None:
    with ScriptedDaemon(socket_file, behave=lambda get: do) as daemon:
        session = open_session(daemon)
        session.get(1, epoch=0, chunk=3, first=0, count=4)
        lost = None
        while lost is None:
            _, lost = session.wait(wake)
        assert lost in named.split("|")
        session.get(2, epoch=0, chunk=3, first=0, count=4)  # is no error: the engine hears of it in its next wait
        session.close()


def test_waiting_ends_when_it_is_woken(socket_file: Path, open_session: Open, wake: int) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        session = open_session(daemon)
        os.eventfd_write(wake, 1)
        assert session.wait(wake) == ([], None)
        session.close()


def test_frames_live_no_longer_than_what_is_read_from_them(socket_file: Path, open_session: Open, wake: int) -> None:
    with ScriptedDaemon(socket_file, size=(64, 64)) as daemon:
        session = open_session(daemon)
        session.get(1, epoch=0, chunk=3, first=0, count=4)
        rows = answer(session, wake)
        (levels, *_) = rows.images(0, 4)
        gone = weakref.ref(rows)
        del rows
        gc.collect()
        assert gone() is None
        assert levels[:, 0, 0, 0].tolist() == [level(0, p) for p in (12, 13, 14)]  # what is held, holds its frame
        session.close()


# -- handshake ------------------------------------------------------------------------------------------------


def test_progress_is_waited_for(socket_file: Path, open_session: Open) -> None:
    with ScriptedDaemon(socket_file, indexing=50) as daemon:
        open_session(daemon).close()


def test_silence_runs_into_the_deadline(socket_file: Path, open_session: Open) -> None:
    with (
        ScriptedDaemon(socket_file, indexing=None) as daemon,
        pytest.raises(DeadlineError, match=r"does not answer: no progress for 0\.3 s"),
    ):
        open_session(daemon, timeout=0.3)


def test_a_refusal_carries_the_error(socket_file: Path, open_session: Open) -> None:
    refused = Refused(kind="ConfigError", text="no stream 'b'; there is: a")
    with ScriptedDaemon(socket_file, refuse=refused) as daemon:
        with pytest.raises(Refusal) as caught:
            open_session(daemon, "b")
        assert isinstance(caught.value.error, ConfigError)
        assert daemon.hellos[0].stream == "b"
        assert daemon.hellos[0].transport == "tcp"


def test_closing_interrupts_the_handshake(socket_file: Path, open_session: Open, wake: int) -> None:
    timer = threading.Timer(0.2, os.eventfd_write, (wake, 1))
    timer.start()
    with ScriptedDaemon(socket_file, indexing=None) as daemon, pytest.raises(Interrupted):
        open_session(daemon, timeout=60)
    timer.join()


@pytest.fixture
def router() -> Iterator[tuple[str, Callable[[Callable[[Any], list[Message]]], None]]]:
    """A bare ROUTER, and what makes it answer each message as the test says."""
    context: Context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.linger = 0
    sock.bind("tcp://127.0.0.1:*")
    address = sock.last_endpoint.decode().rstrip("\0")  # type: ignore[union-attr]
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def serve(answers: Callable[[Any], list[Message]]) -> None:
        def run() -> None:
            while not stop.is_set():
                if sock.poll(20):
                    identity, data = sock.recv_multipart()
                    for message in answers(decode_remote(data)):
                        sock.send_multipart([identity, encode(message)])

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield address, serve
    stop.set()
    for thread in threads:
        thread.join(10)
    sock.close()
    context.term()


HELLO = [welcome(transport="tcp", endpoint="")]


@pytest.mark.parametrize(
    ("hello", "attach", "error", "named"),
    [
        ([welcome(transport="shm")], [], ProtocolError, "offers transport shm instead of tcp"),
        ([Goodbye(reason="maintenance")], [], ConnectionLost, "is stopping: maintenance"),
        ([Failed(request=1, kind="x", text="y")], [], ProtocolError, "Failed is no answer to Hello"),
        (HELLO, [], DeadlineError, r"does not take connections into the session: no answer for 0\.3 s"),
        (HELLO, [Unknown(token=b"t" * 16)], ConnectionLost, "ended the session before it was ready"),
        (HELLO, [Refused(kind="ConfigError", text="too many")], Refusal, "too many"),
        (HELLO, HELLO, ProtocolError, "Welcome is no answer to Attach"),
    ],
)
def test_a_handshake_that_goes_wrong_says_how_and_leaves_nothing_open(
    router: Any, context: Context, wake: int, hello: list[Message], attach: list[Message],
    error: type[HeadraceError], named: str,
) -> None:  # fmt: skip
    address, serve = router
    serve(lambda message: hello if isinstance(message, Hello) else attach)
    with pytest.raises(error, match=named):
        RemoteSession.open(address, None, context, timeout=0.3, stop=wake)


@pytest.mark.parametrize(
    "endpoint",
    [
        "nowhere",
        "tcp://127.0.0.1:none",
        "tcp://192.0.2.1:5555",
        "tcp://127.0.0.1:0;127.0.0.2:5555",
        "tcp://127.0.0.1:5555\n",
    ],
)
def test_an_endpoint_that_is_none_or_of_another_host_is_an_error(
    socket_file: Path, context: Context, wake: int, endpoint: str
) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        daemon.tcp_address = endpoint
        with pytest.raises(ProtocolError, match=f"endpoint {endpoint}"):
            RemoteSession.open_here(daemon.address, None, context, timeout=10, stop=wake)
        wait_until(lambda: not daemon.sessions)


def test_zeromq_that_is_no_router_is_an_end_and_no_silence(context: Context, wake: int) -> None:
    publisher = context.socket(zmq.PUB)
    publisher.bind("tcp://127.0.0.1:*")
    address = publisher.last_endpoint.decode().rstrip("\0")  # type: ignore[union-attr]
    with pytest.raises(ConnectionLost, match="closed the connection before it was ready"):
        RemoteSession.open(address, None, context, timeout=60, stop=wake)
    publisher.close()


# -- rows out of frames -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", range(8))
def test_frames_may_lie_anywhere_in_memory(shift: int) -> None:
    layout = SlotLayout(4, 2, 2, "float32", 3)
    rng = np.random.default_rng(shift)
    images = rng.integers(0, 256, (3, 2, 2, 3), np.uint8)
    labels = rng.random((3, 3), np.float32)
    indices = np.array([5, 1 << 40, 7])
    status = np.full(3, 2, np.uint8)

    class Frame:
        """As zmq.Frame, at an odd place."""

        def __init__(self, data: bytes) -> None:
            self.buffer = memoryview(bytes(shift) + data)[shift:]

        def __len__(self) -> int:
            return len(self.buffer)

    message = Rows(request=1, first=1, count=3, split=2, render_id="r", window=1, rejects=[])
    parts: list[Any] = [Frame(x.tobytes()) for x in (images[:2], images[2:], labels, indices, status)]
    rows = RowsDelivery(layout, message, parts)
    assert np.array_equal(np.concatenate([*rows.images(1, 3)]), images)
    assert np.array_equal(rows.labels, labels)
    assert np.array_equal(rows.indices, indices)
    assert np.array_equal(rows.status, status)
