"""Connecting to an address."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.connect import connect, reach, scheme, socket_path, tcp_place
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, ProtocolError
from headrace.session import Interrupted


def listener(path: Path, backlog: int = 8) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(backlog)
    return sock


def test_an_ipc_address_names_a_path() -> None:
    assert socket_path("ipc:///run/a b/x.sock") == "/run/a b/x.sock"
    assert socket_path("ipc://relative.sock") == "relative.sock"


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("tcp://host:5555", "must be ipc://PATH"),
        ("ipc://", "must be ipc://PATH"),
        ("unix:///x", "must be ipc://PATH"),
        ("/x", "must be ipc://PATH"),
        ("ipc:///" + "é" * 60, "121 bytes, a Unix socket at most 107"),
    ],
)
def test_another_address_is_refused_with_the_reason(address: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        socket_path(address)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("tcp://data-host:5555", ("data-host", 5555)),
        ("tcp://127.0.0.1:1", ("127.0.0.1", 1)),
        ("tcp://[::1]:65535", ("::1", 65535)),
        ("tcp://[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_a_tcp_address_names_host_and_port(address: str, place: tuple[str, int]) -> None:
    assert tcp_place(address) == place
    assert scheme(address) == "tcp"
    assert scheme("ipc:///x") == "ipc"


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("tcp://", "must be tcp://HOST:PORT"),
        ("tcp://host", "must be tcp://HOST:PORT"),
        ("tcp://:5555", "must be tcp://HOST:PORT"),
        ("tcp://host:0", "from 1 to 65535"),
        ("tcp://host:65536", "from 1 to 65535"),
        ("tcp://host:http", "from 1 to 65535"),
        ("tcp://host:+1", "from 1 to 65535"),
        ("tcp://host:5555/x", "from 1 to 65535"),
        ("tcp://::1:5555", "in brackets"),
        ("tcp://[::1]", "in brackets"),
        ("tcp://*:5555", "name the host"),
        ("http://host:80", "must be ipc://PATH or tcp://HOST:PORT"),
    ],
)
def test_a_tcp_address_that_cannot_be_is_refused_with_the_reason(address: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        scheme(address)


def test_a_frame_goes_through(tmp_path: Path) -> None:
    with listener(tmp_path / "x") as server:
        channel = connect(f"ipc://{tmp_path}/x", timeout=5)
        channel.send(b"hello", timeout=5)
        with server.accept()[0] as peer:
            assert peer.recv(100).endswith(b"hello")
        channel.close()


def test_nobody_there_says_whether_there_ever_was(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="no daemon was started there"):
        connect(f"ipc://{tmp_path}/x", timeout=5)
    listener(tmp_path / "x").close()
    with pytest.raises(ConnectionLost, match="the daemon that was there is gone"):
        connect(f"ipc://{tmp_path}/x", timeout=5)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may connect to anything")
def test_no_permission_says_what_decides_about_it(tmp_path: Path) -> None:
    with listener(tmp_path / "x"):
        (tmp_path / "x").chmod(0)
        with pytest.raises(ConnectionLost, match=r"socket\.group"):
            connect(f"ipc://{tmp_path}/x", timeout=5)


def test_a_daemon_whose_queue_is_full_is_waited_for(tmp_path: Path) -> None:
    with listener(tmp_path / "x", backlog=0) as server:
        first = connect(f"ipc://{tmp_path}/x", timeout=5)
        with pytest.raises(ConnectionLost):
            connect(f"ipc://{tmp_path}/x", timeout=0.1)
        accepted: list[socket.socket] = []

        def accept_late() -> None:
            time.sleep(0.2)
            accepted.append(server.accept()[0])

        thread = threading.Thread(target=accept_late)
        thread.start()
        second = connect(f"ipc://{tmp_path}/x", timeout=20)
        thread.join()
        for channel in (first, second):
            channel.close()
        accepted[0].close()


def test_a_wait_for_a_full_queue_is_interrupted(tmp_path: Path, never: int) -> None:
    with listener(tmp_path / "x", backlog=0):
        first = connect(f"ipc://{tmp_path}/x", timeout=5)
        os.eventfd_write(never, 1)
        with pytest.raises(Interrupted):
            connect(f"ipc://{tmp_path}/x", timeout=60, stop=never)
        first.close()


# -- tcp ------------------------------------------------------------------------------------------------------


@pytest.fixture
def never() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def service(*said: bytes, family: socket.AddressFamily = socket.AF_INET) -> Iterator[int]:
    """A port at which each connection is told the next of these; the last stays open."""
    with socket.socket(family) as server:
        server.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        server.listen()
        kept: list[socket.socket] = []

        def serve() -> None:
            for words in said:
                kept.append(server.accept()[0])
                kept[-1].sendall(words)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join(10)
            for sock in kept:
                sock.close()


def greeting(mechanism: bytes) -> bytes:
    """ZeroMQ's, as a server sends it."""
    return b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


GREETING = greeting(b"NULL")


def test_a_daemon_is_reached_by_number_whatever_its_name(never: int) -> None:
    with service(GREETING, GREETING) as port:
        assert reach(f"tcp://127.0.0.1:{port}", timeout=10, stop=never) == f"tcp://127.0.0.1:{port}"
        assert reach(f"tcp://localhost:{port}", timeout=10, stop=never) == f"tcp://127.0.0.1:{port}"


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_daemon_is_reached_over_ipv6(never: int) -> None:
    with service(GREETING, family=socket.AF_INET6) as port:
        assert reach(f"tcp://[::1]:{port}", timeout=10, stop=never) == f"tcp://[::1]:{port}"


def test_a_port_at_which_nobody_listens_says_so_at_once(never: int) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        before = time.monotonic()
        with pytest.raises(ConnectionLost, match="no daemon at .*nobody listens at this port"):
            reach(f"tcp://127.0.0.1:{sock.getsockname()[1]}", timeout=60, stop=never)
        assert time.monotonic() - before < 30


def test_a_host_that_is_not_known_is_named(never: int) -> None:
    with pytest.raises(ConnectionLost, match="host 'no-such-host.invalid' is not known"):
        reach("tcp://no-such-host.invalid:5555", timeout=10, stop=never)


@pytest.mark.parametrize(
    ("said", "error", "named"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", ProtocolError, "no daemon of this kind: it begins with b'SSH-2"),
        (b"\xff\xff\xff", DeadlineError, r"says no more for 0\.3 s"),
        (b"", DeadlineError, r"says nothing for 0\.3 s"),
        (greeting(b"PLAIN"), ProtocolError, "no daemon of this kind: it wants b'PLAIN'"),
    ],
)
def test_another_service_at_the_port_is_told_from_a_daemon(
    said: bytes, error: type[HeadraceError], named: str, never: int
) -> None:
    with service(said) as port, pytest.raises(error, match=named):
        reach(f"tcp://127.0.0.1:{port}", timeout=0.3, stop=never)


@pytest.mark.parametrize(
    ("mechanism", "keys", "named"),
    [
        (b"CURVE", False, r'wants keys: .*`headrace keygen`.* curve=\{"secret_key": FILE, "server": FILE\}'),
        (b"NULL", True, "has no keys and encrypts nothing, and is refused"),
    ],
)
def test_keys_that_only_one_side_has_are_named_at_once(mechanism: bytes, keys: bool, named: str, never: int) -> None:
    with service(greeting(mechanism)) as port, pytest.raises(ConfigError, match=named):
        reach(f"tcp://127.0.0.1:{port}", timeout=60, stop=never, keys=keys)


def test_a_greeting_that_comes_in_pieces_is_waited_for(never: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as sock:
                assert sock.recv(64) == b"\xff" + bytes(8) + b"\x7f\x03"
                for byte in greeting(b"CURVE"):
                    sock.sendall(bytes([byte]))
                assert not sock.recv(64)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert reach(address, timeout=10, stop=never, keys=True) == address
        thread.join(10)


def test_a_connection_that_ends_at_once_is_no_daemon(never: int) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with pytest.raises(ConnectionLost, match="ended the connection at once"):
            reach(f"tcp://127.0.0.1:{server.getsockname()[1]}", timeout=10, stop=never)
        thread.join()


@pytest.mark.parametrize("said", [1, 10, 11, 63])
def test_a_greeting_that_is_cut_off_is_a_connection_lost_and_no_other_service(said: int, never: int) -> None:
    """A network that fails, or a daemon that ends, at this moment: a Loader in the middle of an epoch tries again."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as sock:
                sock.recv(64)
                sock.sendall(GREETING[:said])

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionLost, match="in the middle of its greeting"):
            reach(f"tcp://127.0.0.1:{server.getsockname()[1]}", timeout=10, stop=never)
        thread.join(10)


def test_a_host_that_does_not_answer_runs_into_the_deadline(never: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        place = server.getsockname()
        full = [socket.socket() for _ in range(8)]  # the queue is full, and packets to it are dropped
        for sock in full:
            sock.setblocking(False)
            sock.connect_ex(place)
        with pytest.raises(DeadlineError, match=r"no answer from .* within 0\.3 s.*firewall"):
            reach(f"tcp://127.0.0.1:{place[1]}", timeout=0.3, stop=never)
        for sock in full:
            sock.close()


def test_each_address_of_a_host_gets_its_share_of_the_time(never: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed, service(GREETING) as port:
        closed.bind(("127.0.0.1", 0))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", p)) for p in (closed.getsockname()[1], port)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert reach(f"tcp://two-homes:{port}", timeout=10, stop=never) == f"tcp://127.0.0.1:{port}"


def test_reaching_is_interrupted(never: int) -> None:
    timer = threading.Timer(0.1, os.eventfd_write, (never, 1))
    timer.start()
    with service(b"") as port, pytest.raises(Interrupted):
        reach(f"tcp://127.0.0.1:{port}", timeout=60, stop=never)
    timer.join()
