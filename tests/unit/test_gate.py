"""Who comes in over tcp where there are keys: those clients and nobody else, whoever else tries, and how often."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq

from headrace import protocol, tcp
from headrace.connect import reach
from headrace.errors import ConfigError
from headrace.keys import Keys, generate, read_pair, read_public
from headrace.pipeline.spec import Curve
from headrace.protocol import Alive, Ping, Rows
from headrace.server.keys import Gate, ServerKeys
from headrace.server.listener import tcp_endpoint
from headrace.server.network import TIMINGS, Lane, Network
from headrace.workers.loop import Loop

TIMEOUT = 20.0
PING = protocol.encode(Ping())


@pytest.fixture(scope="module", autouse=True)
def collector() -> Iterator[None]:
    """The thread in which pyzmq learns what has left: one for the process, started by the first frame."""
    from zmq.utils.garbage import gc

    zmq.Frame(bytes(1 << 17), track=True)
    yield
    gc.stop()


class Hub:
    """A gate and a network behind it in this process, their loop turned by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("server", "alice", "mallory"):
            generate(folder, name)
        keys = ServerKeys.load(Curve(secret_key=folder / "server.key_secret", clients=[folder / "alice.key"]))
        assert keys is not None
        self.keys = keys
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.loop = Loop()
        self.heard: list[tuple[bytes, zmq.Frame]] = []
        self.gate = Gate(self.context, self.loop, keys)
        self.network = Network(
            self.context,
            self.loop,
            lambda network, identity, frame: self.heard.append((identity, frame)),
            public=True,
            crowded=lambda: False,
            known=lambda network, identity: True,
            gate=self.gate,
            timings=dataclasses.replace(TIMINGS, attach=4.0),  # so long libzmq may hold on to who is not answered for
        )
        self.endpoint = self.network.bind("tcp://127.0.0.1:*")
        self._peers: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._made: list[zmq.Socket[bytes]] = []

    def peer(self, name: str | None = "alice", server: str = "server", **options: Any) -> zmq.Socket[bytes]:
        """One that connects with these keys, and says something."""
        made = self._peers.socket(zmq.DEALER)
        self._made.append(made)
        made.linger, made.reconnect_ivl = 0, -1
        if name is not None:
            load = Keys.load(
                {"secret_key": self.folder / f"{name}.key_secret", "server": self.folder / f"{server}.key"}
            )
            assert load is not None
            load.secure(made)
        for option, value in options.items():
            setattr(made, option, value)
        made.get_monitor_socket(zmq.EVENT_DISCONNECTED)  # for who asks for it later: the end may be sooner
        made.connect(self.endpoint)
        made.send(PING)
        return made

    def without_a_key(self) -> None:
        """One without keys that waits to be hung up on. One that hangs up itself, as libzmq may, counts for nobody."""
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), TIMEOUT) as made:
            made.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            made.setblocking(False)
            self.until(lambda: _ended(made))

    def until(self, done: Callable[[], Any]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not done():
            assert time.monotonic() < deadline
            self.loop.run_once(0.01)
            self.network.sweep()

    def turned_away(self) -> tuple[int, int]:
        """How many with other keys, and without: not said yet."""
        return self.gate._unknown, self.gate._keyless

    def close(self) -> None:
        self.network.close()
        self.gate.close()
        self.context.term()
        self._peers.destroy(0)


def _ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False


@pytest.fixture
def hub(home: Path) -> Iterator[Hub]:
    made = Hub(home / "keys")
    yield made
    made.close()


def test_who_has_a_key_that_is_named_comes_in_and_is_called_by_its_file(hub: Hub) -> None:
    peer = hub.peer()
    hub.until(lambda: hub.heard)
    identity, frame = hub.heard[0]
    assert frame.bytes == PING
    assert frame.get("User-Id") == "alice"
    assert hub.network.send(identity, Alive())
    assert peer.poll(1000 * int(TIMEOUT)) and protocol.decode_remote_reply(peer.recv()) == Alive()
    assert hub.turned_away() == (0, 0)


@pytest.mark.parametrize(
    ("name", "server", "counted"),
    [("mallory", "server", (1, 0)), ("alice", "mallory", (0, 1)), (None, "", None)],
    ids=["another key", "another daemon's key", "no key"],
)
def test_nobody_else_comes_in_and_others_are_served_meanwhile(
    hub: Hub, name: str | None, server: str, counted: tuple[int, int] | None
) -> None:
    stranger = hub.peer(name, server)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    if counted is None:  # either side may be the first to end that
        hub.until(lambda: monitor.poll(0))
    else:
        hub.until(lambda: hub.turned_away() == counted)
    hub.until(lambda: not hub.network.connections)
    peer = hub.peer()
    hub.until(lambda: hub.heard)
    assert [frame.get("User-Id") for _, frame in hub.heard] == ["alice"]
    assert not stranger.poll(0) and not peer.poll(0)


def test_who_pretends_to_be_through_with_the_handshake_is_not_heard(hub: Hub) -> None:
    """The bytes of a client without keys, and those of one that skips the handshake, as they may be written by hand."""
    port = int(hub.endpoint.rpartition(":")[2])
    message = b"\x00" + bytes([len(PING)]) + PING
    for mechanism, rest in ((b"NULL", b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\6DEALER"), (b"CURVE", b"")):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(TIMEOUT)
            stranger.sendall(greeting + rest + message)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(1000):
                    pass
    hub.until(lambda: hub.turned_away() == (0, 2))
    hub.until(lambda: not hub.network.connections)
    assert not hub.heard


class Relay:
    """Between a peer and the hub; damages what one of them says next, once it is told to."""

    def __init__(self, endpoint: str) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._port = int(endpoint.rpartition(":")[2])
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.damages: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        peer, _ = self._server.accept()
        with peer, socket.create_connection(("127.0.0.1", self._port)) as hub:
            while True:
                for source, target, name in ((peer, hub, "peer"), (hub, peer, "hub")):
                    if select.select([source], [], [], 0.002)[0]:
                        if not (data := bytearray(source.recv(1 << 16))):
                            return
                        if self.damages == name:
                            data[3] ^= 1  # of the name of CURVE's command for a message
                            self.damages = None
                        target.sendall(data)

    def close(self) -> None:
        self._thread.join(TIMEOUT)
        self._server.close()


@pytest.mark.parametrize("who", ["peer", "hub"])
def test_a_message_that_was_damaged_on_its_way_ends_the_connection_and_no_process(hub: Hub, who: str) -> None:
    """libzmq tells of it as of a handshake that failed, and forgets in doing so that it has."""
    for _ in range(5):
        hub.heard.clear()
        relay = Relay(hub.endpoint)
        keys = Keys.load({"secret_key": hub.folder / "alice.key_secret", "server": hub.folder / "server.key"})
        lane = tcp.Lane(hub._peers, relay.endpoint, silence=60_000, limit=1000, keys=keys)
        try:
            lane.send(Ping())
            hub.until(lambda: hub.heard)
            relay.damages = who
            if who == "peer":
                lane.send(Ping())
            else:
                assert hub.network.send(hub.heard[0][0], Alive())
            hub.until(lambda lane=lane: lane.monitor.poll(0))  # type: ignore[misc]
            assert lane.end() is tcp.End.CLOSED
            hub.until(lambda: not hub.network.connections)
            assert len(hub.heard) == 1 and not lane.socket.poll(0)
        finally:
            lane.close()
            relay.close()
    assert hub.turned_away() == (0, 0)


def test_a_look_without_keys_is_counted_and_one_with_keys_is_not(hub: Hub) -> None:
    stop = os.eventfd(0)
    try:
        for _ in range(3):
            assert reach(hub.endpoint, timeout=TIMEOUT, stop=stop, keys=True) == hub.endpoint
        with pytest.raises(ConfigError, match=f"the daemon at {hub.endpoint} wants keys"):
            reach(hub.endpoint, timeout=TIMEOUT, stop=stop)
    finally:
        os.close(stop)
    hub.until(lambda: hub.turned_away()[1])
    hub.until(lambda: not hub.network.connections)
    assert hub.turned_away() == (0, 1)


def test_a_flood_of_strangers_is_one_line_that_says_how_many_and_no_secret(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.gate.tick()
    assert not caplog.records
    hub.peer("mallory")
    hub.until(lambda: hub.turned_away() == (1, 0))
    hub.gate.tick()
    for _ in range(10):
        hub.peer("mallory")
    hub.until(lambda: hub.turned_away()[0] == 10)
    for _ in range(10):
        hub.without_a_key()
    hub.until(lambda: hub.turned_away() == (10, 10))
    for _ in range(100):
        hub.gate.tick()
    (first,) = caplog.messages
    assert "1 with keys that `curve.clients` does not name" in first
    assert read_public(hub.folder / "mallory.key", "x").decode() in first and "from 127.0.0.1" in first
    hub.gate._said -= 60
    hub.gate.tick()
    assert "10 with keys" in caplog.messages[1] and "; 10 without a key" in caplog.messages[1]
    assert len(caplog.records) == 2
    for file in hub.folder.glob("*_secret"):
        assert read_pair(file, "x").secret.decode() not in caplog.text


def test_where_nobody_answers_libzmq_nobody_comes_in(hub: Hub) -> None:
    """As before the gate is bound, or after it is closed: the right key helps nobody then."""
    hub.gate._loop.unwatch(hub.gate._socket)
    hub.gate._socket.close(0)
    try:
        monitor = hub.peer().get_monitor_socket(zmq.EVENT_DISCONNECTED)
        hub.until(lambda: monitor.poll(0))
        hub.until(lambda: not hub.network.connections)
        assert not hub.heard
    finally:
        hub.gate._socket = hub.context.socket(zmq.REP)


def test_what_is_no_question_or_another_domains_is_answered_with_no(hub: Hub) -> None:
    key = next(iter(hub.keys.clients))
    good = [b"1.0", b"7", b"headrace", b"127.0.0.1", b"", b"CURVE", key]
    assert hub.gate._answer(good) == [b"1.0", b"7", b"200", b"OK", b"alice", b""]
    bad = [good[:n] for n in range(7)] + [[*good, b""]]
    bad += [[*good[:n], b"x", *good[n + 1 :]] for n in (0, 2, 5, 6)]
    for question in bad:
        assert hub.gate._answer(question)[2:] == [b"400", b"", b"", b""]


def test_rows_and_many_small_messages_pass(hub: Hub) -> None:
    """CURVE adds to each message: to the largest that may come, and to what was not taken for messages of it."""
    peer = hub.peer(sndhwm=0, rcvhwm=0)
    hub.until(lambda: hub.heard)
    # More of what CURVE adds than a connection may send without a message coming of it.
    for _ in range(9000):
        peer.send(PING)
    peer.send(bytes(protocol.CLIENT_LIMIT))
    hub.until(lambda: len(hub.heard) == 9002)
    hub.network._looked -= 60
    hub.network.sweep()
    levels = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    done: list[int] = []
    head = Rows(request=1, first=0, count=1, split=1, render_id="fake", window=1, rejects=[])
    assert hub.network.ship(Lane(hub.heard[0][0]), head, [levels, levels[:5]], lambda: done.append(1))
    hub.until(lambda: done)
    assert peer.poll(1000 * int(TIMEOUT))
    assert peer.recv_multipart()[1:] == [levels.tobytes(), levels[:5].tobytes()]
    peer.send(bytes(protocol.CLIENT_LIMIT + 1))
    hub.until(lambda: not hub.network.connections)
    assert len(hub.heard) == 9002


def test_clients_may_be_a_folder_of_keys(home: Path) -> None:
    server, alice, bob = (
        generate(home / folder, name) for folder, name in (("s", "s"), ("c", "alice"), ("c", "bob\n"))
    )
    (home / "c" / ".hidden.key").write_text("")
    keys = ServerKeys.load(Curve(secret_key=server[1], clients=[home / "c"]))
    assert keys is not None
    assert sorted(keys.clients.values()) == ["alice", "bob\\n"]
    assert dataclasses.replace(keys) == ServerKeys.load(Curve(secret_key=server[1], clients=[alice[0], bob[0]]))
    assert ServerKeys.load(Curve()) is None


def test_a_folder_without_a_key_would_let_nobody_in(home: Path) -> None:
    server = generate(home / "s", "s")[1], generate(home / "s", "t")[0]
    (home / "c").mkdir()
    with pytest.raises(ConfigError, match=r"curve\.clients: no NAME\.key is in .*/c, so nobody could connect"):
        ServerKeys.load(Curve(secret_key=server[0], clients=[home / "c"]))
    with pytest.raises(ConfigError, match=r"curve\.clients: .*/none cannot be read: No such file"):
        ServerKeys.load(Curve(secret_key=server[0], clients=[home / "none"]))
    os.chmod(server[0], 0o644)
    with pytest.raises(ConfigError, match=r"curve\.secret_key: .* is open to others"):
        ServerKeys.load(Curve(secret_key=server[0], clients=[server[1]]))


@pytest.mark.parametrize("name", ["c", "c/alice.key"])
def test_keys_that_anybody_may_add_or_change_are_refused(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, place = generate(home / "s", "s")[1], home / name
    generate(home / "c", "alice")
    curve = Curve(secret_key=server, clients=[home / "c"])
    place.chmod(0o772)
    with pytest.raises(ConfigError, match=rf"^curve\.clients: anybody .* can change {place} .*chmod o-w"):
        ServerKeys.load(curve)
    place.chmod(0o775)
    assert ServerKeys.load(curve)
    place.chmod(0o777)
    monkeypatch.setattr(os, "statvfs", lambda path: mock.Mock(f_flag=os.ST_RDONLY))
    assert ServerKeys.load(curve)


@pytest.mark.parametrize("place", ["x" * 300, "c/alice.key/x", "loop"])
def test_a_place_that_cannot_even_be_looked_at_is_named(home: Path, place: str) -> None:
    server = generate(home / "c", "alice")[1]
    (home / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"^curve\.clients: .* cannot be read: "):
        ServerKeys.load(Curve(secret_key=server, clients=[home / place]))


def test_with_keys_a_daemon_may_listen_where_others_reach_it() -> None:
    assert tcp_endpoint("tcp://*:5555", insecure=False, keys=True) == "tcp://0.0.0.0:5555"
    with pytest.raises(ConfigError, match=r"make keys with `headrace keygen DIR` and name them in `curve`"):
        tcp_endpoint("tcp://*:5555", insecure=False)
