"""Connecting to an address."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from headrace.connect import connect, socket_path
from headrace.errors import ConfigError, ConnectionLost


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
        ("tcp://host:5555", "tcp is not available yet"),
        ("ipc://", "must be ipc://PATH"),
        ("unix:///x", "must be ipc://PATH"),
        ("/x", "must be ipc://PATH"),
        ("ipc:///" + "é" * 60, "121 bytes, a Unix socket at most 107"),
    ],
)
def test_another_address_is_refused_with_the_reason(address: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        socket_path(address)


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
