"""The ROUTER for tcp: rows leave without a copy, leases last until they have, nobody's silence holds anything up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from remote import BareClient

from headrace import protocol
from headrace.errors import ConfigError
from headrace.protocol import Alive, Get, Goodbye, Ping, Rows
from headrace.server.network import TIMINGS, Lane, Network
from headrace.server.remote import Remote
from headrace.workers.loop import Loop

TIMEOUT = 20.0
ROWS = Rows(request=1, first=0, count=1, split=1, render_id="fake", window=1, rejects=[])
PING = protocol.encode(Ping())
ALIVE = Alive()
BIG = 32 << 20  # more than the kernel takes on its way


@pytest.fixture(scope="module", autouse=True)
def collector() -> Iterator[None]:
    """The thread in which pyzmq learns what has left: one for the process, started by the first frame."""
    from zmq.utils.garbage import gc

    zmq.Frame(bytes(1 << 17), track=True)
    yield
    gc.stop()


class Hub:
    """A network in this process, its loop turned by hand."""

    def __init__(self, *, most: int = 100, **timings: float) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.loop = Loop()
        self.heard: list[tuple[bytes, bytes]] = []
        self.known: set[bytes] = set()
        self.network = Network(
            self.context,
            self.loop,
            lambda network, identity, frame: self.heard.append((identity, frame.bytes)),
            public=True,
            crowded=lambda: self.network.connections > most,
            known=lambda network, identity: identity in self.known,
            timings=replace(TIMINGS, **timings),
        )
        self.endpoint = self.network.bind("tcp://127.0.0.1:*")

    def until(self, done: Callable[[], Any], timeout: float = TIMEOUT, *, turn: bool = True) -> None:
        """Turn the loop, unless it is not to take anything yet."""
        deadline = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < deadline, f"not within {timeout} s"
            if turn:
                self.loop.run_once(0.01)
                self.network.sweep()
            else:
                time.sleep(0.01)

    def turn(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def lane(self, peer: zmq.Socket[bytes] | BareClient) -> Lane:
        """The connection of a peer, which says something first."""
        before = len(self.heard)
        if isinstance(peer, BareClient):
            peer.say(Ping())
        else:
            peer.send(PING)
        self.until(lambda: len(self.heard) > before)
        return Lane(self.heard[-1][0])

    def close(self) -> None:
        self.network.close()
        self.context.term()


@pytest.fixture
def hubs() -> Iterator[Callable[..., Hub]]:
    made: list[Hub] = []

    def make(**options: Any) -> Hub:
        made.append(Hub(**options))
        return made[-1]

    yield make
    for hub in made:
        hub.close()


@pytest.fixture
def peers() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []

    def make(endpoint: str, **options: Any) -> zmq.Socket[bytes]:
        peer = context.socket(zmq.DEALER)
        made.append(peer)
        for name, value in {"linger": 0, "reconnect_ivl": -1, **options}.items():
            setattr(peer, name, value)
        peer.connect(endpoint)
        return peer

    yield make
    for peer in made:
        peer.close(0)
    context.term()


@pytest.fixture
def bare() -> Iterator[Callable[..., BareClient]]:
    made: list[BareClient] = []

    def make(endpoint: str, **options: Any) -> BareClient:
        made.append(BareClient(endpoint, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


def fields(*sizes: int) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(sum(sizes))
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


def of_other_end(peer: socket.socket, ask: Callable[[socket.socket], int]) -> int:
    """What is so at the other end of a connection, which is in this process, too."""
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as end:
                if end.getpeername() == peer.getsockname():
                    return ask(end)
    raise AssertionError("there is no other end")


def send_buffer(end: socket.socket) -> int:
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def unread(end: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(end, termios.FIONREAD, bytes(4)), sys.byteorder)


def on_its_way(end: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


@pytest.mark.parametrize(("source", "near"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_of_what_goes_to_the_same_address_the_kernel_holds_little(
    hubs: Callable[..., Hub], source: str, near: bool
) -> None:
    hub = hubs()
    port = int(hub.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), source_address=(source, 0)) as peer:
        hub.until(lambda: hub.network.connections)
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())  # the kernel grants twice that, and no more
        assert (of_other_end(peer, send_buffer) == 2 * min(256 << 10, most)) is near


# -- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5,), (0, 3), (1 << 20, 64, 0), (3 << 20, 2 << 20, 70_000, 10)])
def test_rows_arrive_as_they_are_and_are_done_once_they_have_left(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]], sizes: tuple[int, ...]
) -> None:
    hub = hubs()
    peer = peers(hub.endpoint)
    lane, sent, done = hub.lane(peer), fields(*sizes), []
    assert hub.network.ship(lane, ROWS, sent, lambda: done.append(1))
    hub.until(lambda: done)
    head, *frames = peer.recv_multipart()
    assert protocol.decode_remote_reply(head) == ROWS
    assert frames == [field.tobytes() for field in sent]


def test_rows_that_a_peer_does_not_take_are_not_done_and_those_of_others_are(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]], bare: Callable[..., BareClient]
) -> None:
    hub = hubs()
    stuck, peer = hub.lane(bare(hub.endpoint)), peers(hub.endpoint)
    lane, done = hub.lane(peer), []
    for _ in range(3):
        assert hub.network.ship(stuck, ROWS, fields(BIG), lambda: done.append("stuck"))
    for _ in range(20):
        assert hub.network.ship(lane, ROWS, fields(1 << 20), lambda: done.append("other"))
    hub.until(lambda: len(done) == 20)
    hub.turn(0.3)
    assert done == ["other"] * 20


def test_rows_are_done_when_their_peer_is_gone(hubs: Callable[..., Hub], bare: Callable[..., BareClient]) -> None:
    hub = hubs()
    client = bare(hub.endpoint)
    lane, done = hub.lane(client), []
    for number in range(3):
        hub.network.ship(lane, ROWS, fields(BIG), lambda number=number: done.append(number))
    hub.turn(0.2)
    assert not done
    client.close()
    hub.until(lambda: hub.network.gone(lane.identity))
    hub.until(lambda: len(done) == 3)
    assert done == [0, 1, 2]
    assert not hub.network.ship(lane, ROWS, fields(BIG), lambda: done.append(3))
    assert done[3:] == [3]  # nothing was sent, so nothing is read any more


def test_the_memory_of_rows_may_change_once_they_are_done_and_only_then_does_it_go(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]]
) -> None:
    """Refilled as soon as they are done, many times over, while the reader is slow: every payload is whole."""
    hub = hubs()
    peer = peers(hub.endpoint, rcvhwm=2)
    lane = hub.lane(peer)
    slots = [np.zeros(4 << 20, np.uint8) for _ in range(3)]
    free, filled, read = list(range(3)), 0, 0
    while read < 40:
        hub.loop.run_once(0.001)
        hub.network.sweep()
        while free and filled < 40:
            slot = free.pop()
            slots[slot][:] = filled
            filled += 1
            assert hub.network.ship(lane, ROWS, [slots[slot]], lambda slot=slot: free.append(slot))
        if peer.poll(0):
            levels = np.frombuffer(peer.recv_multipart()[1], np.uint8)
            assert (levels == read).all()
            read += 1
            time.sleep(0.005)


def test_a_network_with_rows_that_have_not_left_closes_at_once_and_lets_go_of_them(
    bare: Callable[..., BareClient],
) -> None:
    hub = Hub()
    lane = hub.lane(bare(hub.endpoint))
    memory = np.ones(BIG, np.uint8)
    for _ in range(4):
        hub.network.ship(lane, ROWS, [memory], lambda: None)
    begin = time.monotonic()
    hub.close()
    assert time.monotonic() - begin < 5
    deadline = time.monotonic() + TIMEOUT
    while lane.shipments and not all(shipment.left for shipment in lane.shipments):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_network_looks_less_and_less_often_after_rows_that_do_not_leave(
    hubs: Callable[..., Hub], bare: Callable[..., BareClient]
) -> None:
    hub = hubs()
    lane = hub.lane(bare(hub.endpoint))
    assert hub.network.patience == 0.25
    hub.network.ship(lane, ROWS, fields(BIG), lambda: None)
    waits = []
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        waits.append(hub.network.patience)
        hub.loop.run_once(hub.network.patience)
        hub.network.sweep()
    assert waits[0] < waits[-1] == 0.25 and len(waits) < 60


# -- who is there -----------------------------------------------------------------------------------------------


def test_a_peer_that_takes_nothing_is_gone_after_a_while(
    hubs: Callable[..., Hub], bare: Callable[..., BareClient]
) -> None:
    hub = hubs(stuck=1.0)
    lane, done = hub.lane(bare(hub.endpoint)), []
    for _ in range(3):
        hub.network.ship(lane, ROWS, fields(BIG), lambda: done.append(1))
    hub.until(lambda: hub.network.gone(lane.identity))
    hub.until(lambda: len(done) == 3)


def test_a_peer_that_answers_no_heartbeat_is_gone_after_a_while(
    hubs: Callable[..., Hub], bare: Callable[..., BareClient], peers: Callable[..., zmq.Socket[bytes]]
) -> None:
    hub = hubs(heartbeat=0.2, silence=0.8)
    silent, busy = hub.lane(bare(hub.endpoint)), hub.lane(peers(hub.endpoint))
    hub.until(lambda: hub.network.gone(silent.identity))
    hub.turn(1.0)
    assert not hub.network.gone(busy.identity)  # its thread answers, though its program does nothing


def test_who_is_muted_is_not_heard_and_forgotten_when_gone(
    hubs: Callable[..., Hub], bare: Callable[..., BareClient]
) -> None:
    hub = hubs()
    client = bare(hub.endpoint)
    lane = hub.lane(client)
    hub.network.mute(lane.identity)
    client.say(Ping())
    hub.turn(0.3)
    assert len(hub.heard) == 1
    hub.network.forget_the_gone()
    client.say(Ping())
    hub.turn(0.2)
    assert len(hub.heard) == 1
    client.close()
    hub.until(lambda: hub.network.gone(lane.identity))
    hub.network.forget_the_gone()
    assert not hub.network._muted


def test_a_peer_with_an_identity_of_its_own_choice_or_more_than_one_frame_is_not_heard(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]]
) -> None:
    hub = hubs()
    for identity in (b"somebody", b"\0somebody"):
        chosen = peers(hub.endpoint, routing_id=identity)
        chosen.send(PING)
    peer = peers(hub.endpoint)
    peer.send_multipart([PING, PING])
    hub.until(lambda: hub.network.nonsense == 3)
    assert not hub.heard


@pytest.mark.parametrize("version", [1, 2])
def test_a_message_of_a_protocol_before_this_one_is_not_heard_and_ends_nothing(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]], version: int
) -> None:
    """libzmq hands such messages on, but not what it knows of others."""
    hub = hubs()
    port = int(hub.endpoint.rpartition(":")[2])
    greeting = b"\x01\0" if version == 1 else b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\0\0"
    message = bytes([len(PING) + 1, 0]) + PING if version == 1 else bytes([0, len(PING)]) + PING
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(greeting + message)
        hub.until(lambda: hub.network.nonsense == 1)
        hub.lane(peers(hub.endpoint))
    assert len(hub.heard) == 1


def _ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_connections_beyond_the_most_are_cut_off_and_the_others_go_on(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]]
) -> None:
    hub = hubs(most=3)
    peer = peers(hub.endpoint)
    lane = hub.lane(peer)
    hub.known.add(lane.identity)
    port = int(hub.endpoint.rpartition(":")[2])
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
    for connection in crowd:
        connection.setblocking(False)
    # Not until there are three: so many there are for a moment before the others have come.
    hub.until(lambda: sum(map(_ended, crowd)) == 8)
    assert list(map(_ended, crowd)) == [True] * 8 + [False] * 2  # who comes last finds room
    hub.network.send(lane.identity, Alive())
    assert peer.poll(5000)
    for connection in crowd:
        connection.close()
    hub.until(lambda: hub.network.connections == 1)
    hub.lane(peers(hub.endpoint))


def test_connections_that_belong_to_no_session_are_cut_off_after_a_while_and_the_others_stay(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]]
) -> None:
    hub = hubs(attach=1.5)
    peer, idle, asking, refused = (peers(hub.endpoint) for _ in range(4))
    hub.known.add(hub.lane(peer).identity)
    hub.lane(asking)
    hub.turn(0.8)
    identity = hub.lane(refused).identity
    hub.network.send(identity, ALIVE)
    hub.network.mute(identity)
    hub.turn(0.8)
    assert refused.poll(5000) and refused.recv() == protocol.encode(ALIVE)  # what it was told has got out
    hub.until(lambda: hub.network.connections == 1)
    assert idle.poll(0) == 0
    hub.turn(2.0)
    hub.lane(peer)
    hub.known.clear()
    hub.until(lambda: hub.network.connections == 0)


def test_a_client_that_breaks_off_with_all_it_may_have_said_unread_ends_nothing(
    hubs: Callable[..., Hub], bare: Callable[..., BareClient]
) -> None:
    """libzmq would end the process if it had stopped to read, and found a heartbeat in what it has read already."""
    hub = hubs()
    client = bare(hub.endpoint)
    lane = hub.lane(client)
    data = protocol.encode(Get(token=bytes(16), request=0, epoch=0, chunk=0))
    said = (b"\x00" + bytes([len(data)]) + data) * (protocol.MAX_OUTSTANDING // 64)
    for _ in range(64):
        client.socket.sendall(said + b"\x04\x07\x04PING\x00\x00")
    # What libzmq has not read is lost with a connection that is broken off.
    hub.until(lambda: not on_its_way(client.socket) and not of_other_end(client.socket, unread), turn=False)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    time.sleep(0.1)
    hub.until(lambda: hub.network.gone(lane.identity))
    # What comes out of a connection that has ended is nobody's.
    hub.until(lambda: len(hub.heard) + hub.network.nonsense == 1 + protocol.MAX_OUTSTANDING)


def test_strangers_that_come_and_go_leave_nothing_behind(
    hubs: Callable[..., Hub], bare: Callable[..., BareClient]
) -> None:
    """Whoever comes next has the descriptor of who has gone."""
    hub = hubs(attach=0.2)
    for _ in range(20):
        before = len(hub.heard)
        strangers = [bare(hub.endpoint) for _ in range(3)]
        for stranger in strangers:
            stranger.say(Ping())
        hub.until(lambda before=before: len(hub.heard) == before + 3)  # type: ignore[misc]
        for stranger in strangers:
            stranger.close()
        hub.until(lambda: not hub.network.connections)
    client = bare(hub.endpoint)
    hub.known.add(hub.lane(client).identity)
    hub.turn(1.0)
    assert hub.network.connections == 1
    assert set(hub.network._spoke) == hub.known
    assert len(hub.network._cut_off) == 0


def test_the_longer_it_takes_to_look_at_all_connections_the_less_often_that_is_done(
    hubs: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a crowd, for one, which comes faster than it is sent away."""
    hub = hubs()
    looked: list[float] = []

    def look() -> None:
        looked.append(time.monotonic())
        time.sleep(0.05)

    monkeypatch.setattr(hub.network, "_cut_the_useless", look)
    hub.until(lambda: len(looked) == 3)
    assert looked[2] - looked[1] >= 20 * 0.05


def test_there_are_no_more_connections_than_all_sessions_may_have(hubs: Callable[..., Hub]) -> None:
    hub = hubs()
    made = Remote(hub.context, hub.loop, mock.Mock(), 1 << 20, threads=range(1), timings=TIMINGS)
    try:
        made.listen("tcp://127.0.0.1:*")
        assert made._public is not None
        for there, crowded in ((1024 * 17, False), (1024 * 17 + 1, True)):
            made._public._connections = dict.fromkeys(range(there), mock.Mock())
            assert made._public._crowded() is crowded
        made._public._connections.clear()
    finally:
        made.close()


def test_of_what_is_large_one_waits_for_a_peer_that_does_not_read(
    hubs: Callable[..., Hub], bare: Callable[..., BareClient]
) -> None:
    hub = hubs()
    peer = bare(hub.endpoint, receive_buffer=4096)
    identity = hub.lane(peer).identity
    large = Goodbye(reason="x" * BIG)
    assert hub.network.send_one(identity, lambda: large)
    hub.turn(0.1)
    assert not hub.network.send_one(identity, lambda: large)
    left, data = BIG, b""
    while left > 0:
        left -= len(peer.socket.recv(1 << 20))
        hub.turn(0)
    hub.until(lambda: hub.network.send_one(identity, lambda: Goodbye(reason="again")))
    again = protocol.encode(Goodbye(reason="again"))
    while not (data := data + peer.read(1)).endswith(again):
        pass


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        bytes(np.random.default_rng(1).integers(0, 256, 5000, np.uint8)),
        b"\xff" + bytes(8) + b"\x7f\x09\x09" + b"NULL".ljust(52, b"\0") + b"\x04\x05\x05WRONG",
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(52, b"\0"),
        b"\x01\x00" + b"\x7f" * 300,
    ],
    ids=["HTTP", "random", "a version to come", "another mechanism", "an old version"],
)
def test_what_is_no_peer_disturbs_nobody(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]], junk: bytes
) -> None:
    hub = hubs()
    port = int(hub.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(junk)
        hub.turn(0.3)
        hub.lane(peers(hub.endpoint))
    assert len(hub.heard) == 1
    hub.until(lambda: hub.network.connections == 1)


# -- where it listens -------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named(hubs: Callable[..., Hub]) -> None:
    hub, other = hubs(), hubs()
    with pytest.raises(ConfigError, match=f"listen: {hub.endpoint}: another program, or another daemon"):
        other.network.bind(hub.endpoint)


def test_an_address_of_another_machine_is_named(hubs: Callable[..., Hub]) -> None:
    with pytest.raises(ConfigError, match=r"listen: tcp://192.0.2.1:5555: this machine has no such address"):
        hubs().network.bind("tcp://192.0.2.1:5555")


def test_one_network_listens_in_several_places(
    hubs: Callable[..., Hub], peers: Callable[..., zmq.Socket[bytes]]
) -> None:
    hub = hubs()
    places = [hub.endpoint, hub.network.bind("tcp://127.0.0.2:*")]
    if socket.has_ipv6:
        places.append(hub.network.bind("tcp://[::1]:*"))
    assert len({hub.lane(peers(place, ipv6="[" in place)).identity for place in places}) == len(places)
