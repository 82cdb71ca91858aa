"""The stretch of network that other tests lay: it does to connections what it says."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from proxy import Proxy


class Line:
    """A listener, the proxy before it, and one connection through both."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.proxy = Proxy(f"tcp://127.0.0.1:{self.listener.getsockname()[1]}")
        self.client, self.server = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = self.dial()
        server = self.listener.accept()[0]
        server.settimeout(20)
        return client, server

    def dial(self) -> socket.socket:
        host, _, port = self.proxy.address.removeprefix("tcp://").partition(":")
        return socket.create_connection((host, int(port)), timeout=20)

    def close(self) -> None:
        self.proxy.__exit__()
        for each in (self.listener, self.client, self.server):
            each.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def arrives(data: bytes, sender: socket.socket, receiver: socket.socket) -> float:
    """Seconds that it takes; all of it is what was sent."""
    before = time.monotonic()
    sender.sendall(data)
    got = b""
    while len(got) < len(data):
        more = receiver.recv(1 << 16)
        assert more
        got += more
    assert got == data
    return time.monotonic() - before


def silent(receiver: socket.socket, seconds: float = 0.2) -> bool:
    receiver.settimeout(seconds)
    try:
        receiver.recv(1)
    except TimeoutError:
        return True
    finally:
        receiver.settimeout(20)
    return False


def test_what_goes_in_comes_out_both_ways_and_so_does_the_end(line: Line) -> None:
    arrives(bytes(range(256)) * 4000, line.client, line.server)
    arrives(bytes(range(255, -1, -1)) * 4000, line.server, line.client)
    line.client.sendall(b"the last word")
    line.client.close()
    assert line.server.recv(99) == b"the last word"
    assert line.server.recv(99) == b""


def test_delay_and_pace_take_the_time_that_they_say(line: Line) -> None:
    line.proxy.delay = 0.2
    assert arrives(b"x", line.client, line.server) >= 0.2
    line.proxy.delay = 0.0
    line.proxy.pace = 100_000
    assert arrives(bytes(50_000), line.server, line.client) >= 0.4


def test_a_cut_is_an_end_to_both_sides_and_a_reset_an_error(line: Line) -> None:
    line.proxy.cut(line.proxy.alive[0])
    assert line.client.recv(1) == line.server.recv(1) == b""
    client, server = line.connect()
    arrives(b"x", client, server)
    line.proxy.cut(line.proxy.alive[0], reset=True)
    for side in (client, server):
        with pytest.raises(ConnectionResetError):
            side.recv(1)
        side.close()


@pytest.mark.parametrize("client", [False, True])
def test_a_half_open_connection_has_ended_on_one_side_only(line: Line, client: bool) -> None:
    arrives(b"x", line.client, line.server)
    line.proxy.halve(line.proxy.alive[0], client=client)
    ended, other = (line.client, line.server) if client else (line.server, line.client)
    assert ended.recv(1) == b""
    ended.close()
    assert silent(other)
    assert len(line.proxy.alive) == 1
    other.close()
    deadline = time.monotonic() + 20
    while line.proxy.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not line.proxy.alive


def test_what_is_held_is_brought_later(line: Line) -> None:
    arrives(b"x", line.client, line.server)
    (stretch,) = line.proxy.alive
    stretch.hold()
    line.client.sendall(b"late")
    assert silent(line.server)
    stretch.held = False
    assert line.server.recv(99) == b"late"


def test_new_connections_are_refused_or_left_alone(line: Line) -> None:
    line.proxy.refusing = True
    with pytest.raises(ConnectionError), line.dial() as refused:
        refused.recv(1)
    line.proxy.refusing, line.proxy.mute = False, True
    with line.dial() as left:
        left.sendall(b"anybody there?")
        assert silent(left)
        assert len(line.proxy.alive) == 2
    line.proxy.mute = False
    client, server = line.connect()
    arrives(b"x", client, server)
    client.close()
    server.close()


def test_nobody_behind_it_is_a_reset() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with Proxy(f"tcp://127.0.0.1:{free.getsockname()[1]}") as proxy:
            host, _, port = proxy.address.removeprefix("tcp://").partition(":")
            with pytest.raises(ConnectionError), socket.create_connection((host, int(port)), timeout=20) as client:
                client.recv(1)
