"""A real daemon to which strangers come beside its clients: with bytes that are no protocol, half of one, or none."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import photos as samples
import pytest
from barrage import framed
from mutants import KINDS, Mutants
from remote import TIMEOUT, BareClient, RemoteClient
from service import Daemon, Trainer, Truth, stream, until

from headrace import protocol
from headrace.connect import connect
from headrace.ping import ping
from headrace.protocol import Hello, Ping, Pong

CONNECTS = 10_000


@pytest.fixture(scope="module")
def daemon(photos: Path, session_home: Path) -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(dir=session_home))
    streams = {"train": stream(samples.links(photos, folder / "many", 160))}
    with Daemon(folder, streams, slots=8, backend="fake", tcp=True, metrics=True) as made:
        # What a client may make it open for good is open from now on: the stream, the port for sessions that begin at
        # the Unix socket, and what pyzmq needs for frames that are not copied.
        RemoteClient(made.tcp_address).close()
        channel = connect(made.address, timeout=TIMEOUT)
        channel.send(protocol.encode(Hello(stream="train", transport="tcp")), timeout=TIMEOUT)
        channel.recv(timeout=TIMEOUT)
        channel.close()
        assert isinstance(ping(made.tcp_address), Pong)
        until(lambda: made.ping().sessions == 0, "the end of the session")
        yield made


class Crowd:
    """Strangers that come one after another, in a thread, as long as somebody else is served."""

    def __init__(self, come: Callable[[], None]) -> None:
        self.came = 0
        self._come = come
        self._over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join(TIMEOUT)

    def _run(self) -> None:
        while not self._over:
            with contextlib.suppress(OSError):
                self._come()
            self.came += 1


def resident(pid: int) -> int:
    return int(re.findall(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)[0]) << 10


def descriptors(pid: int) -> Counter[str]:
    """What they are, without the numbers of sockets."""
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/{pid}/fd/{fd}").partition("[")[0]] += 1
    return found


def epoch_is_whole(daemon: Daemon, home: Path, address: str, name: str) -> None:
    with Trainer(address, home / f"{name}.jsonl", transport="tcp" if address.startswith("tcp:") else "shm") as trainer:
        trainer.wait()
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)


def undisturbed(daemon: Daemon, before: Counter[str]) -> None:
    """All that strangers held has been given back, the log is short and knows no exception."""
    deadline = time.monotonic() + TIMEOUT
    while more := descriptors(daemon.pid) - before:
        assert time.monotonic() < deadline, f"these are left: {more}"
        time.sleep(0.1)
    until(lambda: daemon.ping().sessions == 0, "the end of all sessions")
    log = daemon.log.read_text()
    assert "Traceback" not in log and len(log) < 200_000


# -- over tcp ---------------------------------------------------------------------------------------------------


class Zmtp:
    """What a peer of ZeroMQ's may send, and what it may not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._mutants = Mutants(seed)

    def bytes(self) -> bytes:
        """Of one connection."""
        r = self.random
        data = self._greeting() + (self._ready() if r.random() < 0.9 else b"")
        data += b"".join(self._more() for _ in range(r.randrange(8)))
        return data[: r.randrange(len(data) + 1)] if r.random() < 0.1 else data

    def _greeting(self) -> bytes:
        r = self.random
        identity = r.choice((b"", b"\0abcd", b"me", b"x" * 255))
        match r.randrange(10):
            case 0:
                return b"\xff" + r.randbytes(8) + b"\x7f" + bytes([r.randrange(5), r.randrange(12)]) + r.randbytes(40)
            case 1:  # ZMTP 1.0
                return bytes([min(254, len(identity) + 1), 0]) + identity
            case 2:  # ZMTP 2.0
                head = b"\xff" + (len(identity) + 1).to_bytes(8, "big") + b"\x7f"
                return head + bytes([1, r.randrange(11)]) + self._frame(0, identity)
            case 3:
                return r.randbytes(r.randrange(100))
        mechanism = r.choice((b"NULL", b"NULL", b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"X" * 20))
        minor = r.choice((0, 1, 1, 1, 9))
        return b"\xff" + bytes(8) + b"\x7f\x03" + bytes([minor]) + mechanism.ljust(20, b"\0") + bytes(32)

    def _ready(self) -> bytes:
        r = self.random
        kind = r.choice((b"DEALER",) * 8 + (b"ROUTER", b"REQ", b"PUB", b"SUB", b"", b"X" * 300))
        body = self._property(b"Socket-Type", kind)
        body += self._property(b"Identity", r.choice((b"", b"", b"", b"\0\0\0\0\1", b"a", b"x" * 255, b"y" * 256)))
        for _ in range(r.randrange(3)):
            body += self._property(r.choice((b"", b"X", b"Peer-Address", b"Z" * 255)), r.randbytes(r.randrange(20)))
        name = r.choice((b"READY",) * 9 + (b"HELLO", b"INITIATE", b"ERROR"))
        return self._frame(4, bytes([len(name)]) + name + body)

    def _more(self) -> bytes:
        r = self.random
        match r.randrange(10):
            case 0:
                return self._frame(4, b"\x04PING" + r.randbytes(r.randrange(40)))
            case 1:
                name = r.choice((b"PONG", b"SUBSCRIBE", b"CANCEL", b"ERROR", b"READY", b""))
                return self._frame(4, bytes([len(name)]) + name + r.randbytes(r.randrange(20)))
            case 2:
                return self._frame(r.choice((1, 5)), r.randbytes(r.randrange(300)))
            case 3:
                size = r.choice((0, 65536, 65537, 1 << 31, (1 << 63) - 1, (1 << 64) - 1))
                return bytes([r.choice((2, 6))]) + size.to_bytes(8, "big") + r.randbytes(r.randrange(100))
            case 4:
                return r.randbytes(r.randrange(50))
        return self._frame(0, self._mutants.bytes(KINDS, bytes(16)))

    def _frame(self, flags: int, data: bytes) -> bytes:
        r = self.random
        if r.random() < 0.1:
            flags ^= 1 << r.randrange(8)
        if len(data) > 255 or r.random() < 0.1:
            return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data
        return bytes([flags]) + bytes([len(data)]) + data

    def _property(self, name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def test_no_bytes_over_tcp_disturb_the_daemon_or_a_trainer(daemon: Daemon, home: Path) -> None:
    """libzmq has to survive them as well; it ends the process where an assertion of its own does not hold."""
    host, _, port = daemon.tcp_address.removeprefix("tcp://").rpartition(":")
    before, zmtp = descriptors(daemon.pid), Zmtp(1)
    open_ones: list[socket.socket] = []

    def come() -> None:
        if len(open_ones) > 40:
            open_ones.pop(zmtp.random.randrange(40)).close()
        stranger = socket.create_connection((host, int(port)), timeout=1)
        open_ones.append(stranger)
        data = zmtp.bytes()
        cut = zmtp.random.randrange(len(data) + 1)
        stranger.sendall(data[:cut])
        stranger.sendall(data[cut:])

    try:
        with Crowd(come) as crowd:
            epoch_is_whole(daemon, home, daemon.tcp_address, "tcp")
            epoch_is_whole(daemon, home, daemon.address, "shm")
            until(lambda: crowd.came >= 2000, "strangers")
    finally:
        for stranger in open_ones:
            stranger.close()
    undisturbed(daemon, before)


def test_who_asks_for_all_there_is_and_does_not_read_costs_no_memory(daemon: Daemon) -> None:
    asking = [BareClient(daemon.tcp_address, receive_buffer=4096) for _ in range(16)]
    try:
        answer = len(protocol.encode(daemon.ping()))
        before = resident(daemon.pid)
        question = protocol.encode(Ping(detail=True))
        for stranger in asking:
            stranger.socket.sendall((b"\0" + bytes([len(question)]) + question) * 3000)
            stranger.say(Hello(stream="train", transport="tcp"))
        until(lambda: daemon.ping().sessions == len(asking), "all of it to be heard")
        assert 16 * 3000 * answer > 18 << 20  # what would wait for them
        assert resident(daemon.pid) - before < 8 << 20
    finally:
        for stranger in asking:
            stranger.close()


# -- at the Unix socket -----------------------------------------------------------------------------------------


def test_ten_thousand_strangers_at_the_unix_socket_disturb_nobody(daemon: Daemon, home: Path) -> None:
    """They say nothing, half of something, nonsense, or pass descriptors that nobody has asked for."""
    path = daemon.address.removeprefix("ipc://")
    before, grown, r, mutants = descriptors(daemon.pid), resident(daemon.pid), random.Random(2), Mutants(2)
    hello = framed(protocol.encode(Hello(stream="train", client="nobody")))
    null = os.open(os.devnull, os.O_RDONLY)
    open_ones: list[socket.socket] = []

    def come() -> None:
        if len(open_ones) > 40:
            open_ones.pop(r.randrange(40)).close()
        stranger = socket.socket(socket.AF_UNIX)
        stranger.settimeout(1)
        open_ones.append(stranger)
        stranger.connect(path)
        match r.randrange(6):
            case 0:
                stranger.sendall(hello[: r.randrange(len(hello))])
            case 1:
                stranger.sendall(framed(mutants.bytes(KINDS, bytes(16)), r.choice((0, 0, 1, 255))))
            case 2:
                socket.send_fds(stranger, [hello[: r.randrange(1, 20)]], [null] * r.randrange(1, 50))
            case 3:
                stranger.sendall(framed(protocol.encode(Ping())) * 3)

    try:
        with Crowd(come) as crowd:
            epoch_is_whole(daemon, home, daemon.address, "shm")
            until(lambda: crowd.came >= CONNECTS, "strangers")
            assert isinstance(daemon.ping(), Pong)
    finally:
        os.close(null)
        for stranger in open_ones:
            stranger.close()
    undisturbed(daemon, before)
    assert resident(daemon.pid) - grown < 16 << 20


def test_who_says_no_hello_at_the_unix_socket_is_sent_away_whatever_it_says(daemon: Daemon) -> None:
    """Also who asks all the time, and reads."""
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(TIMEOUT)
    stranger.connect(daemon.address.removeprefix("ipc://"))
    question = framed(protocol.encode(Ping()))
    began = time.monotonic()
    with stranger, contextlib.suppress(ConnectionError):
        while time.monotonic() - began < TIMEOUT:
            stranger.sendall(question)
            select.select([stranger], [], [], 1.0)
            if not stranger.recv(1 << 16):
                break
            time.sleep(0.2)
    assert 5 < time.monotonic() - began < TIMEOUT
