"""Which way rows come, by address, argument and where the daemon is."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from scripted import ScriptedDaemon

from headrace.errors import ConfigError, ConnectionLost
from headrace.session import Session
from headrace.transport import Transport, open_session

Open = Callable[[str, Transport], Session]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens sessions, and closes them after the test."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stop = os.eventfd(0, os.EFD_NONBLOCK)
    sessions: list[Session] = []

    def open_one(address: str, transport: Transport) -> Session:
        sessions.append(open_session(address, None, transport, context, timeout=10, stop=stop))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()
    context.destroy(0)
    os.close(stop)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "d.sock") as running:
        yield running


@pytest.mark.parametrize(
    ("remote", "transport", "used"),
    [
        (False, "auto", "shm"), (False, "shm", "shm"), (False, "tcp", "tcp"),
        (True, "auto", "shm"), (True, "shm", "shm"), (True, "tcp", "tcp"),
    ],
)  # fmt: skip
def test_a_daemon_on_this_host_is_read_through_shared_memory_unless_told_otherwise(
    daemon: ScriptedDaemon, opened: Open, remote: bool, transport: Transport, used: str
) -> None:
    session = opened(daemon.tcp_address if remote else daemon.address, transport)
    assert session.welcome.transport == used
    assert daemon.hellos[-1].transport == used
    assert session.address == (daemon.tcp_address if remote and used == "tcp" else daemon.address)


def test_a_daemon_whose_socket_is_not_here_is_on_another_host(
    daemon: ScriptedDaemon, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.unix_address = f"ipc://{tmp_path}/elsewhere.sock"
    with caplog.at_level(logging.INFO, "headrace"):
        assert opened(daemon.tcp_address, "auto").welcome.transport == "tcp"
    assert "is not on this host (no daemon at ipc://" in caplog.text
    with pytest.raises(ConfigError, match=r"transport: shm needs a daemon on this host.*elsewhere\.sock.*use 'tcp'"):
        opened(daemon.tcp_address, "shm")


def test_a_daemon_that_has_its_socket_where_another_has_it_here_is_on_another_host(
    daemon: ScriptedDaemon, opened: Open, tmp_path: Path
) -> None:
    with ScriptedDaemon(tmp_path / "e.sock") as namesake:
        daemon.unix_address = namesake.address
        assert opened(daemon.tcp_address, "auto").welcome.transport == "tcp"
        with pytest.raises(ConfigError, match="another daemon is at"):
            opened(daemon.tcp_address, "shm")
        assert not namesake.hellos


def test_a_daemon_sends_nobody_to_another_address_of_the_network(daemon: ScriptedDaemon, opened: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        daemon.unix_address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        assert opened(daemon.tcp_address, "auto").welcome.transport == "tcp"
        with pytest.raises(ConfigError, match="says that its Unix socket is at tcp://"):
            opened(daemon.tcp_address, "shm")
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_nonsense_where_its_socket_should_be_is_another_host_too(daemon: ScriptedDaemon, opened: Open) -> None:
    daemon.unix_address = "nonsense"
    assert opened(daemon.tcp_address, "auto").welcome.transport == "tcp"


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_nobody_there_is_the_same_error_whatever_the_transport(opened: Open, transport: Transport) -> None:
    with pytest.raises(ConnectionLost, match="no daemon at ipc:///nowhere"):
        opened("ipc:///nowhere", transport)
    with pytest.raises(ConnectionLost, match="no daemon at tcp://127.0.0.1:1: "):
        opened("tcp://127.0.0.1:1", transport)


def test_an_address_that_is_none_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match="must be ipc://PATH or tcp://HOST:PORT"):
        opened("http://host:80", "auto")
